"""Tables: CSV files, data frames and what else Python code has at hand."""

from __future__ import annotations

import logging
import tracemalloc

import numpy as np
import pytest
import torch

import fedsim
from fedsim import datasets
from fedsim.datasets import dataset_of
from fedsim.errors import FedsimError

PEOPLE = """age,sex,hours,hospital,income
20,f,10.5,north,low
30,m,20,north,high
40,f,30,south,low
50,m,40,south,high
60,f,50,west,low
25,m,60,west,high
"""
COLUMNS = "y=income,owner=hospital"
TYPES = "age=0:100,sex=f|m,hours=number,income=low|high"


@pytest.fixture
def people(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text(PEOPLE)
    return str(path)


def test_ranges_are_scaled_categories_become_features_and_every_fifth_row_is_for_testing(people):
    data = datasets.load(people, columns=COLUMNS, types=TYPES)
    expected = [
        [0.2, 1, 0, 10.5],
        [0.3, 0, 1, 20],
        [0.4, 1, 0, 30],
        [0.5, 0, 1, 40],
        [0.25, 0, 1, 60],
    ]
    torch.testing.assert_close(data.train.x, torch.tensor(expected))
    assert data.train.y.tolist() == [0, 1, 0, 1, 1]
    assert data.test.x.tolist() == [[pytest.approx(0.6), 1, 0, 50]]
    assert (data.num_classes, data.found_in) == (2, {})
    assert data.train.columns["owner"].tolist() == ["north", "north", "south", "south", "west"]


def test_a_missing_text_of_a_list_is_no_owner_called_nan():
    owners = ["a", "b", "a", "b", float("nan")]
    numbers = {"x": [[1.0]] * 5, "y": [0, 1, 0, 1, 0], "owner": owners}
    with pytest.raises(FedsimError, match=r"owner of data= .*a NaN among texts"):
        dataset_of({"train": numbers, "test": numbers})
    table = {"age": [1, 2, 3, 4, 5], "ill": [0, 1, 0, 1, 0], "who": owners}
    with pytest.raises(FedsimError, match="no value in column 'who'"):
        datasets.from_table(table, columns="y=ill,owner=who")


def test_a_category_may_have_a_comma_or_a_bar():
    table = {"job": ["sales, retail", "a|b", "c"] * 2, "ill": [0, 1] * 3}
    made = datasets.from_table(table, columns="y=ill", types=r"job=sales\, retail|a\|b|c,ill=0|1")
    assert made.feature_names == ("job=sales, retail", "job=a|b", "job=c")


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_two_files_in_a_folder_are_training_and_test_examples(tmp_path, separator):
    for split, rows in (("train", PEOPLE), ("test", PEOPLE.replace("20,f", "44,f"))):
        (tmp_path / f"{split}.csv").write_text(rows.replace(",", separator), "utf-8-sig")
    data = datasets.load(str(tmp_path), columns=COLUMNS, types=TYPES)
    assert (len(data.train), len(data.test)) == (6, 6)
    assert data.test.x[0, 0].item() == pytest.approx(0.44)


def test_types_that_are_not_declared_are_found_and_named_so(people):
    data = datasets.load(people, columns=COLUMNS)
    assert data.train.x.shape == (5, 4)
    assert data.found_in["types"] == "train"
    assert data.train.y.tolist() == [1, 0, 1, 0, 0]  # high, low: in the order of texts


def test_normalisation_is_that_of_the_training_rows(people):
    data = datasets.load(people, columns=COLUMNS, types=TYPES, normalize=True)
    hours = np.array([10.5, 20, 30, 40, 60])
    assert data.mean == pytest.approx((0, 0, 0, hours.mean()))
    assert data.std == pytest.approx((1, 1, 1, hours.std()))
    assert data.found_in == {"mean": "train"}


def test_a_scale_is_found_in_the_data_even_where_it_changes_nothing(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,y\n-1,0\n1,1\n-1,0\n1,1\n3,0\n")
    data = datasets.load(str(path), columns="y=y", types="a=number,y=0|1", normalize=True)
    assert (data.mean, data.std) == ((0.0,), (1.0,))
    assert data.found_in == {"mean": "train"}


def test_whole_numbers_are_classes_unless_declared_to_be_numbers(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,y\n" + "".join(f"{i},{i % 3}\n" for i in range(10)))
    assert datasets.load(str(path), columns="y=y").num_classes == 3
    regression = datasets.load(str(path), columns="y=y", types="a=0:10,y=number")
    assert (regression.num_classes, regression.train.y.dtype) == (0, torch.float32)
    assert datasets.load(str(path), columns="y=y", types="y=0|1|2|3").num_classes == 4


def test_wild_scales_are_warned_of(tmp_path, caplog):
    path = tmp_path / "t.csv"
    path.write_text("pay,age,y\n" + "".join(f"{90000 + i},{i},{i % 2}\n" for i in range(10)))
    with caplog.at_level(logging.WARNING, "fedsim"):
        datasets.load(str(path), columns="y=y", types="pay=0:1e6")
        assert not caplog.records
        datasets.load(str(path), columns="y=y")
    assert "above 10 in pay," in caplog.text
    assert "'pay=90000:90008'" in caplog.text


def test_ages_without_a_range_are_warned_of_because_steps_diverge_on_them(tmp_path, caplog):
    path = tmp_path / "t.csv"
    path.write_text("age,y\n" + "".join(f"{23 + i % 39},{i % 2}\n" for i in range(100)))
    with caplog.at_level(logging.WARNING, "fedsim"):
        datasets.load(str(path), columns="y=y", types="age=0:100")
        datasets.load(str(path), columns="y=y", normalize=True)
        assert not caplog.records
        datasets.load(str(path), columns="y=y")
    assert "above 10 in age," in caplog.text


@pytest.mark.parametrize(
    ("text", "settings", "sentence"),
    [
        (PEOPLE, {}, "must name the target's column"),
        (PEOPLE, {"columns": "y=pay"}, "names 'pay', and .* has the columns age, sex, hours"),
        (PEOPLE, {"columns": "y=income,x=age+size"}, "names 'size'"),
        (PEOPLE, {"columns": COLUMNS, "types": "hospital=a|b"}, "neither an input nor the target"),
        (PEOPLE, {"columns": COLUMNS, "types": "age=100:0"}, "must be number, a range"),
        (PEOPLE, {"columns": COLUMNS, "types": "age=old"}, "must be number, a range"),
        (PEOPLE, {"columns": "y=age", "types": "age=0:100"}, "a range, for the target"),
        (PEOPLE, {"columns": COLUMNS, "types": "sex=f|x"}, "has 'm' in column 'sex' .* example 2"),
        (PEOPLE, {"columns": COLUMNS, "types": "sex=number"}, "it must be a finite number"),
        (PEOPLE + "1,2\n", {"columns": COLUMNS}, "2 values in line 8; .* each of its 5 columns"),
        ("a,a,y\n1,2,3\n", {"columns": "y=y"}, "its first line must name the columns"),
        ("a,y\n", {"columns": "y=y"}, "has 0 rows; it must have 5"),
        ("", {"columns": "y=y"}, "its first line must name the columns"),
        ('a,y\n"1,2\n', {"columns": "y=y"}, "could not be read"),
        (PEOPLE, {"columns": "y=income,y=age"}, "others, each once"),
        (PEOPLE, {"columns": "y=income,x=age+income"}, "the target of .* or an input"),
        (PEOPLE, {"columns": "y=income,x=age+age"}, "'age' must be the target .* named once"),
        (PEOPLE, {"columns": COLUMNS, "types": "age=0:9,age=number"}, "names 'age' twice"),
        (PEOPLE, {"columns": COLUMNS, "types": "sex=f|m| f"}, "different categories"),
        (PEOPLE + ",f,1,west,low\n", {"columns": COLUMNS}, "no value in column 'age' .* example 6"),
        (PEOPLE + "3,f,NaN,west,low\n", {"columns": COLUMNS}, "no value in column 'hours'"),
        (PEOPLE + "3,f,1,west,\n", {"columns": COLUMNS}, "no value in column 'income'"),
        ("a,y\n" + "1,-1\n2,1\n" * 5, {"columns": "y=y"}, "class -1 in column 'y'.*'y=-1|1'"),
        ("a,y\n1,0\n2,1\n", {"columns": "y=y"}, "has 2 rows; it must have 5 or more"),
    ],
)
def test_a_table_that_cannot_be_is_one_sentence(tmp_path, text, settings, sentence):
    path = tmp_path / "people.csv"
    path.write_text(text)
    with pytest.raises(FedsimError, match=sentence):
        datasets.load(str(path), **settings)


def test_of_a_file_of_another_kind_it_is_not_said_that_it_is_missing(tmp_path):
    path = tmp_path / "people.parquet"
    path.touch()
    with pytest.raises(FedsimError, match=r"no such data here .* path to an \.npz or a \.csv"):
        datasets.load(str(path), columns="y=y")


@pytest.mark.parametrize("split", ["train", "test"])
def test_both_parts_of_a_table_have_rows(split):
    tables = {"train": {"a": [1.0, 2.0], "y": [0, 1]}, "test": {"a": [1.0, 2.0], "y": [0, 1]}}
    tables[split] = {"a": [], "y": []}
    with pytest.raises(FedsimError, match=f"table has no {split}.* examples; it must have some"):
        datasets.from_table(**tables, columns="y=y")


def test_an_empty_line_is_no_row(people, tmp_path):
    path = tmp_path / "gaps.csv"
    path.write_text(PEOPLE.replace("\n", "\n\n"))
    ours, theirs = (datasets.load(str(p), columns=COLUMNS, types=TYPES) for p in (path, people))
    assert torch.equal(ours.train.x, theirs.train.x)


def test_negative_classes_are_declared_as_categories(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,y\n" + "1,-1\n2,1\n" * 5)
    data = datasets.load(str(path), columns="y=y", types="y=-1|1")
    assert data.train.y.unique().tolist() == [0, 1]


def test_a_column_of_numbers_that_has_a_text_is_categories_with_a_warning(tmp_path, caplog):
    path = tmp_path / "t.csv"
    path.write_text("a,b,y\n" + "".join(f"{i},x{i},{i % 2}\n" for i in range(9)) + "NA,x,0\n")
    with caplog.at_level(logging.WARNING, "fedsim"):
        assert datasets.load(str(path), columns="y=y").train.x.shape == (8, 20)
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} has numbers in column 'a', but also 'NA', so that each of its 10 values is a "
        "category: if the column is meant to hold numbers, correct the values that are not."
    ]


def test_a_column_of_dates_is_categories_with_a_warning(tmp_path, caplog):
    path = tmp_path / "visits.csv"
    days = "".join(f"2026-0{1 + i % 4}-{1 + i // 4:02},{'ab'[i % 2]},{i % 2}\n" for i in range(40))
    path.write_text("day,ward,y\n" + days)
    with caplog.at_level(logging.WARNING, "fedsim"):
        datasets.load(str(path), columns="y=y")
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} has dates in column 'day', which are inputs now: leave them out by data.columns = "
        "'y=y,x=ward', or declare them by data.types."
    ]


def test_a_table_says_what_each_column_became_and_of_protected_rows_what_was_declared(
    tmp_path, caplog
):
    path = tmp_path / "visits.csv"
    people = ((i, 20 + i % 30, "fm"[i % 2], f"H{i % 3}", "-", i % 2) for i in range(100))
    lines = [",".join(map(str, person)) for person in people]
    path.write_text("\n".join(["patient,age,sex,hospital,note,ill", *lines]) + "\n")
    columns = "y=ill,owner=hospital"
    with caplog.at_level(logging.WARNING, "fedsim"):
        found = datasets.load(str(path), columns=columns, types="age=0:100")
    assert found.columns == (
        "patient: number", "age: number scaled from 0:100", "sex: category of 2 values",
        "hospital: owner", "note: category of 1 values", "ill: target, class of 2",
    )  # fmt: skip
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} has a value of its own in every row (an identifier?) in column 'patient', which "
        "are inputs now: leave them out by data.columns = 'y=ill,x=age+sex+note,owner=hospital', "
        "or declare them by data.types."
    ]
    caplog.clear()
    protected = datasets.load(
        str(path), columns=f"{columns},x=age", types="age=0:100,ill=0|1|2|3", protected=True
    )
    assert "ill: target, category of 4 values" in protected.columns
    assert "patient: ignored" in protected.columns
    assert not caplog.records


SURVIVAL = """age,days,died,stage
50,10.5,yes,1
60,-1,no,2
70,300,yes,3
80,4,no,1
90,7,yes,2
"""


def test_several_targets_are_numbers_and_labels_in_their_order(tmp_path):
    path = tmp_path / "patients.csv"
    path.write_text(SURVIVAL)
    columns, types = "y=days+died,x=age", "age=0:100,days=number,died=no|yes"
    for declared in (types, ""):
        data = datasets.load(str(path), columns=columns, types=declared)
        assert data.train.y.tolist() == [[10.5, 1], [-1, 0], [300, 1], [4, 0]]
        assert data.test.y.tolist() == [[7, 1]]
        assert (data.num_classes, data.num_outputs, data.class_names) == (0, 2, ())
    assert data.columns[1:] == (
        "days: target, number",
        "died: target, 0 for no and 1 for yes",
        "stage: ignored",
    )
    # The first of two declared categories is 0, whatever the order of texts is.
    turned = datasets.load(str(path), columns=columns, types=types.replace("no|yes", "yes|no"))
    assert turned.train.y[:, 1].tolist() == [0, 1, 0, 1]
    numbers = datasets.load(str(path), columns="y=stage+days,x=age")  # no class, but a number
    assert numbers.train.y[:, 0].tolist() == [1, 2, 3, 1]


@pytest.mark.parametrize(
    ("columns", "types", "why"),
    [
        ("y=days+stage,x=age", "stage=1|2|3", "'stage' has 3 categories; each must be a number"),
        ("y=days+days,x=age", "", "'days' must be the target .* named once"),
        ("y=days+died,x=age+died", "", "'died' must be the target .* or an input"),
        ("y=days+dead,x=age", "", "names 'dead', and .* has the columns age, days"),
        ("y=days+,x=age", "", "names '', and"),
        ("y=days+died,x=age", "days=0:400", "a range, for the target, which is not scaled"),
    ],
)
def test_several_targets_that_cannot_be_are_refused(tmp_path, columns, types, why):
    path = tmp_path / "patients.csv"
    path.write_text(SURVIVAL)
    with pytest.raises(FedsimError, match=why):
        datasets.load(str(path), columns=columns, types=types)


def test_in_a_protected_table_a_target_that_is_unusable_is_missing_and_ends_nothing(tmp_path):
    path = tmp_path / "patients.csv"
    path.write_text(SURVIVAL.replace("60,-1,no", "60,soon,perhaps"))
    columns, types = "y=days+died,x=age", "age=0:100,days=number,died=no|yes"
    data = datasets.load(str(path), columns=columns, types=types, protected=True)
    assert data.train.y[1].isnan().all()
    assert not data.train.y[[0, 2, 3]].isnan().any()
    undeclared = {"data.name": str(path), "data.columns": columns, "data.types": "age=0:100"}
    private = {"mechanism.name": "clipping", "noise.multiplier": 1.0, "partition.clients": 2}
    task = {"task.loss": "weibull", "task.metrics": "concordance"}
    with pytest.raises(FedsimError, match="does not say what every column"):
        fedsim.run(fedsim.RunConfig().replace(**undeclared, **private, **task), out=None)


def test_numbers_with_a_comma_are_categories_with_a_warning(tmp_path, caplog):
    path = tmp_path / "t.csv"
    path.write_text('a,y\n"0,5",1\n"1,5",0\n"2,0",1\n' + '"1,5",0\n' * 3)
    with caplog.at_level(logging.WARNING, "fedsim"):
        datasets.load(str(path), columns="y=y")
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} has '0,5' in column 'a', and each of its values is a category: if they are "
        "numbers, write decimals after a point, and no commas between thousands."
    ]


def test_spaces_around_a_value_or_a_name_are_no_part_of_it(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text(PEOPLE.replace("high", "high ", 2).replace(",m,", ", m ,", 1))
    for types in ("", "sex=f|m,income=low|high"):
        data = datasets.load(str(path), columns="y = income, x = sex + hours", types=types)
        assert sorted(data.class_names) == ["high", "low"]
        assert data.feature_names == ("sex=f", "sex=m", "hours")
        assert data.train.x[:2, :2].tolist() == [[1, 0], [0, 1]]


@pytest.mark.filterwarnings("error")
def test_a_number_that_float32_does_not_hold_is_named(tmp_path, caplog):
    path = tmp_path / "people.csv"
    path.write_text(PEOPLE.replace("30,m,20", "30,m,-1e39"))
    with pytest.raises(FedsimError, match=r"'-1e39' in column 'hours' .* -3\.4e38 to 3\.4e38"):
        datasets.load(str(path), columns=COLUMNS)
    assert not caplog.records
    data = datasets.load(str(path), columns=COLUMNS, types=TYPES, protected=True)
    assert data.train.x.isnan().any(1).tolist() == [False, True, False, False, False]
    ranged = TYPES.replace("hours=number", "hours=-1e40:1e40")
    assert datasets.load(str(path), columns=COLUMNS, types=ranged).train.x.isfinite().all()


def test_bytes_that_are_no_text_are_one_sentence(tmp_path):
    path = tmp_path / "people.csv"
    path.write_bytes(b"a,y\n\xff\xfe,1\n")
    with pytest.raises(FedsimError, match="must be a table in UTF-8"):
        datasets.load(str(path), columns="y=y")


def test_a_value_that_cannot_be_spoils_only_its_own_example_of_a_protected_table(people, tmp_path):
    path = tmp_path / "people.csv"
    path.write_text(
        PEOPLE.replace("30,m,20", "30,x,many").replace("40,f,30,south,low", "40,f,30,south,?")
    )
    data = datasets.load(str(path), columns=COLUMNS, types=TYPES, protected=True)
    assert data.train.x.isnan().any(1).tolist() == [False, True, False, False, False]
    assert data.train.x[1, 1:3].tolist() == [0, 0]
    assert data.train.columns["unusable"].tolist() == [False, False, True, False, False]


CONFIG = """
rounds = 2
[data]
name = "{path}"
columns = "{columns}"
types = "{types}"
normalize = {normalize}
[partition]
name = "by-owner"
clients = 3
[evaluate]
every = 0
"""
PRIVATE = """
[mechanism]
name = "clipping"
[noise]
multiplier = 1.0
"""


def _run(tmp_path, path, types, private, normalize="false"):
    config = tmp_path / "run.toml"
    config.write_text(
        CONFIG.format(path=path, columns=COLUMNS, types=types, normalize=normalize)
        + (PRIVATE if private else "")
    )
    return fedsim.run(fedsim.RunConfig.load(config))


def test_a_private_run_takes_a_table_whose_columns_are_all_declared(people, tmp_path):
    assert len(_run(tmp_path, people, TYPES, private=True).metrics) == 2
    assert len(_run(tmp_path, people, "", private=False, normalize="true").metrics) == 2


@pytest.mark.parametrize(
    ("types", "normalize", "sentence"),
    [
        (TYPES.replace(",hours=number", ""), "false", "data.types does not say what every column"),
        (TYPES, "true", "data.normalize = true takes mean and deviation from the training"),
    ],
)
def test_a_private_run_finds_nothing_in_a_table(people, tmp_path, types, normalize, sentence):
    with pytest.raises(FedsimError, match=sentence):
        _run(tmp_path, people, types, True, normalize)


def test_a_private_run_says_which_types_are_missing_by_the_users_own_names_alone(people):
    read = {"types": "age=0:100,income=low|high", "protected": True}
    with pytest.raises(FedsimError, match=r"It lacks hours, sex\.$"):
        datasets.load(people, columns="y=income,x=hours+age+sex", **read)
    with pytest.raises(FedsimError, match=r"'age=0:100,sex=female\|male'\.$"):
        datasets.load(people, columns="y=income", **read)  # the others stand in the file alone


def test_a_data_frame_makes_the_numbers_that_its_file_makes(people):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(people)
    frame.index = range(100, 106)  # rows are counted, whatever they are called
    ours = datasets.from_table(frame, columns=COLUMNS, types=TYPES)
    theirs = datasets.load(people, columns=COLUMNS, types=TYPES)
    assert torch.equal(ours.train.x, theirs.train.x)
    assert torch.equal(ours.test.y, theirs.test.y)
    with pytest.raises(FedsimError, match="has 'm' in column 'sex'"):
        datasets.from_table(frame, columns=COLUMNS, types="sex=f|x")


def test_a_data_frames_own_types_are_read_as_its_file_is(tmp_path):
    pandas = pytest.importorskip("pandas")
    columns = {
        "day": pandas.date_range("2024-01-01", periods=10),
        "open": [True, False] * 5,
        "kind": pandas.Categorical(["x", "y"] * 5),
        "count": pandas.array(range(10), dtype="Int64"),
        "y": [True, False] * 5,
    }
    frame = pandas.DataFrame(columns)
    frame.to_csv(tmp_path / "t.csv", index=False)
    ours = datasets.from_table(frame, columns="y=y")
    theirs = datasets.load(str(tmp_path / "t.csv"), columns="y=y")
    assert ours.train.x.shape == (8, 10 + 2 + 2 + 1)
    assert torch.equal(ours.train.x, theirs.train.x)
    assert torch.equal(ours.train.y, theirs.train.y)
    for column in columns:
        frame = pandas.DataFrame(columns).astype({"open": "boolean", "y": "boolean"})
        frame.loc[3, column] = None
        with pytest.raises(FedsimError, match=f"no value in column '{column}' .* example 4"):
            datasets.from_table(frame, columns="y=y")
    with pytest.raises(FedsimError, match="columns a, a, y; each needs a different name"):
        datasets.from_table(pandas.DataFrame([[1, 2, 0]] * 9, columns=list("aay")), columns="y=y")


@pytest.mark.parametrize(
    "frame", [None, 3, {"a": [1, 2], "y": [1]}, {"a": 3}, {}, [[1, 2], [3, 4]]]
)
def test_what_is_no_table_is_one_sentence(frame):
    with pytest.raises(FedsimError, match="a table "):
        datasets.from_table(frame, columns="y=y")


X, Y = np.arange(24, dtype=np.float32).reshape(8, 3), np.arange(8) % 2


@pytest.mark.parametrize(
    "data",
    [
        {"x_train": X[:6], "y_train": Y[:6], "x_test": X[6:], "y_test": Y[6:]},
        {"train": {"x": X[:6], "y": Y[:6]}, "test": (X[6:], Y[6:])},
        ((X[:6], Y[:6]), (torch.from_numpy(X[6:]), torch.from_numpy(Y[6:]))),
        [
            torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
            for x, y in ((X[:6], Y[:6]), (X[6:], Y[6:]))
        ],
    ],
)
def test_arrays_pairs_and_torch_data_sets_are_one_data_set(data):
    made = datasets.dataset_of(data)
    assert torch.equal(made.train.x, torch.from_numpy(X[:6]))
    assert made.test.y.tolist() == [0, 1]
    assert made.num_classes == 2


def test_images_of_a_torch_data_set_keep_their_channels_first():
    images = torch.rand(4, 3, 8, 8)
    split = torch.utils.data.TensorDataset(images, torch.tensor([0, 1, 0, 1]))
    assert torch.equal(datasets.dataset_of((split, split)).train.x, images)
    for pixels in ((255 * images).byte(), (255 * images[:, :1]).byte()):
        for laid_out in (pixels, pixels.movedim(1, 3)):  # as of PILToTensor, and of PIL's images
            split = torch.utils.data.TensorDataset(laid_out, torch.tensor([0, 1, 0, 1]))
            assert torch.equal(datasets.dataset_of((split, split)).train.x, pixels)


class Items(torch.utils.data.Dataset):
    """One item, four times."""

    def __init__(self, x, y):
        self.item = x, y

    def __len__(self):
        return 4

    def __getitem__(self, place):
        return self.item


def test_items_of_a_torch_data_set_may_have_gradients():
    split = Items(torch.ones(3, requires_grad=True), 1.5)
    data = datasets.dataset_of((split, split))
    assert torch.equal(data.train.x, torch.ones(4, 3))
    assert data.train.y.tolist() == [1.5] * 4


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.ones(3).bfloat16(), "x of data= cannot be made an array .*BFloat16"),
        (torch.eye(3).to_sparse(), "x of data= cannot be made an array .*Sparse"),
    ],
)
def test_an_item_that_is_no_array_is_one_sentence(x, words):
    with pytest.raises(FedsimError, match=words):
        datasets.dataset_of((Items(x, 1), Items(x, 1)))


@pytest.mark.parametrize(
    "numbers",
    [
        {"classes": "two"}, {"classes": None}, {"classes": 2.5}, {"classes": np.nan},
        {"classes": [2, 3]}, {"classes": []}, {"vocabulary": np.inf}, {"mean": "a", "std": "b"},
        {"mean": [None] * 3, "std": [1j] * 3},
    ],
)  # fmt: skip
def test_declared_numbers_that_are_none_are_one_sentence(numbers):
    arrays = {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y}
    with pytest.raises(FedsimError, match=r"data= could not be read .* must be one number each"):
        datasets.dataset_of(arrays | numbers)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


@pytest.mark.parametrize(
    "data",
    [
        {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y, "owner": Y},
        3, "digits", X, (X, Y, X), {"x": X, "y": Y}, {"x_train": X, "y_train": Y}, (X, Y), [(X, Y)],
        {"train": 3, "test": 4}, ((X, [[1], [1, 2]]), (X, Y)), (X[:6], Y[:5]),
        ((X, Y), Stream()),
        ((X, Y), torch.utils.data.TensorDataset(torch.from_numpy(X))),
    ],
)  # fmt: skip
def test_what_is_no_data_set_is_one_sentence(data):
    with pytest.raises(FedsimError):
        datasets.dataset_of(data)


def test_a_run_takes_what_python_code_has_at_hand(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text("rounds = 1\n[partition]\nclients = 2\n")
    result = fedsim.run(fedsim.RunConfig.load(config), data=((X[:6], Y[:6]), (X[6:], Y[6:])))
    assert result.arrays["fc1.weight"].numpy().shape == (2, 3)


def test_an_integer_that_no_float_holds_is_one_sentence():
    with pytest.raises(FedsimError, match="must be a finite number"):
        datasets.from_table({"a": [10**400] * 9, "y": [0, 1, 0] * 3}, columns="y=y")


def test_amounts_that_are_taken_for_classes_are_warned_of(tmp_path, caplog):
    path = tmp_path / "t.csv"

    def warned(targets, **settings):
        caplog.clear()
        path.write_text("a,y\n" + "".join(f"0.5,{y}\n" for y in targets))
        with caplog.at_level(logging.WARNING, logger="fedsim"):
            datasets.load(str(path), columns="y=y", **settings)
        return caplog.text

    costs = [2000 + 37 * i for i in range(40)]
    assert "one of 3,444 classes" in warned(costs)
    assert "data.types = 'y=number'" in warned(costs)
    assert not warned(costs, types="a=0:1,y=number")
    assert not warned([i % 100 for i in range(200)])  # many classes, and each has examples
    assert not warned([0, 7, 9, 7, 0, 9])
    with pytest.raises(FedsimError, match=r"data\.types does not say what every column"):
        warned(costs, protected=True)
    assert not caplog.text  # no log line depends on protected examples


def test_owners_are_read_alike_for_training_and_testing():
    def owners(train, test=None):
        frames = [
            {"a": [0.1] * 5, "y": [0, 1, 0, 1, 0], "owner": column} for column in (train, test)
        ]
        tables = frames if test is not None else frames[:1]
        data = datasets.from_table(*tables, columns="y=y,owner=owner", types="a=0:1,y=0|1")
        return [part.columns["owner"].tolist() for part in (data.train, data.test)]

    # As numbers in one part and texts in the other an owner's own test examples were nobody's.
    assert owners(["01", "02", "03", "04", "05"], ["01", "x", "x", "02", "02"]) == [
        ["01", "02", "03", "04", "05"],
        ["01", "x", "x", "02", "02"],
    ]
    assert owners(["10", "9", "8", "7", "6"]) == [[10, 9, 8, 7], [6]]
    long = "123456789012345678901234567890"
    assert owners([long, long + "1", "3", "4", "5"]) == [[long, long + "1", "3", "4"], ["5"]]
    assert owners(["a", "nan", "NaN", "b", "c"])[0] == ["a", "nan", "NaN", "b"]
    for train, test in ((["01", "1", "2", "3", "4"], None), ([1.0, 2, 3, 4, 5], [1, 2, 3, 4, 5])):
        with pytest.raises(FedsimError, match="in column 'owner', which are one number"):
            owners(train, test)
    for nothing in (None, "", " "):
        with pytest.raises(FedsimError, match=r"no value in column 'owner' of its training .* 2"):
            owners(["a", nothing, "b", "c", "d"])


def test_blanks_after_commas_are_not_part_of_a_value(people, tmp_path):
    (tmp_path / "blanks.csv").write_text(PEOPLE.replace(",", ", ").replace("north", '"no, rth"'))
    ours = datasets.load(str(tmp_path / "blanks.csv"), columns=COLUMNS, types=TYPES)
    assert torch.equal(ours.train.x, datasets.load(people, columns=COLUMNS, types=TYPES).train.x)
    assert ours.train.columns["owner"].tolist()[1:3] == ["no, rth", "south"]


def test_values_that_are_masked_are_not_taken_for_numbers():
    x = np.ma.masked_greater(np.ones((4, 2)), 2)  # nothing is
    assert dataset_of(((x, [0, 1, 0, 1]), (x, [0, 1, 0, 1]))).train.x.shape == (4, 2)
    hidden = np.ma.masked_greater(x, 0)
    with pytest.raises(FedsimError, match="x of data= is a masked array"):
        dataset_of(((hidden, [0, 1, 0, 1]), (x, [0, 1, 0, 1])))


@pytest.mark.parametrize("in_python", [False, True])
def test_one_long_owner_does_not_cost_every_row_its_length(tmp_path, in_python):
    owners = ["ab"[k % 2] for k in range(3000)]
    owners[7] = "c" * 100_000
    table = {"a": ["0.5"] * 3000, "y": ["0", "1"] * 1500, "who": owners}
    rows = "".join(",".join(row) + "\n" for row in zip(*table.values(), strict=True))
    (tmp_path / "t.csv").write_text("a,y,who\n" + rows)
    settings = {"columns": "y=y,owner=who", "types": "a=0:1,y=0|1"}
    tracemalloc.start()
    try:
        if in_python:
            data = datasets.from_table(table, **settings)
        else:
            data = datasets.load(str(tmp_path / "t.csv"), **settings)
        dataset_of(data)
        parts = fedsim.partitions.ByOwner(clients=3).indices(data.train.y, data.train.columns)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [len(part) for part in parts] == [1200, 1199, 1]
    assert peak < 30e6  # of texts as wide as the longest, 1.2 GB


@pytest.mark.parametrize(
    "row",
    [
        b"30,m,20,north",
        b"30,m,20,north,high,7",
        b'"30,m,20,north,high',
        b'"3"0,m,20,north,high',
        b"30\xff,m,20,north,high",
        b"3" * 140_000 + b",m,20,north,high",
    ],
)
def test_a_row_that_is_none_is_its_own_loss_in_a_protected_table(tmp_path, row):
    lines = PEOPLE.encode().splitlines()
    lines[2] = row
    (tmp_path / "people.csv").write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines) + b"\n")
    settings = {"columns": COLUMNS, "types": TYPES, "protected": True}
    ours = datasets.load(str(tmp_path / "people.csv"), **settings)
    (tmp_path / "people.csv").write_text(PEOPLE)
    theirs = datasets.load(str(tmp_path / "people.csv"), **settings)
    others = [0, 2, 3, 4]
    assert torch.equal(ours.train.x[others], theirs.train.x[others])
    assert torch.equal(ours.test.x, theirs.test.x)
    owners = ours.train.columns["owner"].tolist()
    assert owners[:1] + owners[2:] == ["north", "south", "south", "west"]


def test_a_protected_table_from_python_is_read_as_a_protected_file_is():
    table = {"age": [20, "?", 40, 50, 60, 70], "ill": [0, 1, "x", 1, 1, 0], "who": [7, 8, 9] * 2}
    table["who"][1], table["who"][4] = None, "08"
    settings = {"columns": "y=ill,owner=who", "types": "age=0:100,ill=0|1"}
    with pytest.raises(FedsimError, match=r"in column 'who' of its training example 2"):
        datasets.from_table(table, **settings)
    data = datasets.from_table(table, **settings, protected=True)
    assert data.train.x.isnan().flatten().tolist() == [False, True, False, False, False]
    assert data.train.columns["unusable"].tolist() == [False, False, True, False, False]
    assert data.train.columns["owner"].tolist() == ["7", "", "9", "7", "9"]
    assert data.test.columns["owner"].tolist() == ["8"]
