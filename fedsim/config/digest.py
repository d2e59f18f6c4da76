"""The release digest: a name for all in a config that determines what a run releases."""

from __future__ import annotations

from collections.abc import Iterator

from fedsim.config.run_config import RunConfig
from fedsim.config.tables import OUTSIDE_RELEASE, Choice, ConfigTable, all_tables, is_table
from fedsim.errors import FedsimError
from fedsim.privacy.digest import digest_of
from fedsim.settings import settings_of


def release_digest(config: RunConfig) -> str:
    """Digest of a config whose noise multipliers and entropy are resolved.

    Two configs of one digest release the same, and draw the same noise for it. Where the
    examples lie and what they are, and the code of the user's own classes, are outside.

    Raises
    ------
    FedsimError
        If something is not resolved, as `fedsim.runs.resolve` does it.
    """
    for key, value, wanted in (
        ("noise.target-epsilon", config.noise.target_epsilon, None),
        ("client.noise.target-epsilon", config.client.noise.target_epsilon, None),
        ("noise.entropy", config.noise.entropy or None, config.noise.entropy or "resolved"),
    ):
        if value != wanted:
            raise FedsimError(f"{key} is {value!r}; a release digest is of a resolved config.")
    kept = {key for key, affects in _keys(RunConfig) if affects}
    kept |= {table.key(key) for table in all_tables(config) for key in _of_choice(table)}
    return digest_of({key: value for key, value in config.to_run_config().items() if key in kept})


def affects_release(key: str) -> bool:
    """Whether a change of this dotted key may change what a run releases.

    Raises
    ------
    FedsimError
        If there is no such key.
    """
    keys = dict(_keys(RunConfig))
    if key not in keys and not _is_a_things(key):
        raise FedsimError(f"there is no key {key} in a config.")
    return keys.get(key, True)


def keys_outside_release() -> frozenset[str]:
    """The dotted keys that no release depends on, which a resumed run may therefore change."""
    return frozenset(key for key, affects in _keys(RunConfig) if not affects)


def _of_choice(table: ConfigTable) -> list[str]:
    """Keys of what a table names: all of those affect releases."""
    if not isinstance(table, Choice):
        return []
    return ["options", *(setting.key for setting in table.own_settings(table.chosen))]


def _is_a_things(key: str) -> bool:
    """Whether it is a setting of something that a table may name."""
    table: type[ConfigTable] | None = RunConfig
    *tables, last = key.split(".")
    for name in tables:
        table = table.tables().get(name) if table else None
    if table is None or not issubclass(table, Choice):
        return False
    return last == "options" or bool(table.takers(last))


def _keys(table: type[ConfigTable], affects: bool = True) -> Iterator[tuple[str, bool]]:
    """Each dotted key below a table, and whether its declaration and its table's say so."""
    for setting in settings_of(table):
        counts = affects and OUTSIDE_RELEASE not in setting.metadata
        if is_table(setting):
            yield from _keys(setting.type, counts)
        else:
            yield table.key(setting.key), counts
