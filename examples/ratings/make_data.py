"""Write ratings.npz: what 200 made-up users think of 50 films, by hidden tastes."""

import numpy as np

USERS, FILMS, EACH = 200, 50, 24


def main() -> None:
    draws = np.random.default_rng(0)
    tastes, films = draws.normal(size=(USERS, 3)), draws.normal(size=(FILMS, 3))
    user = np.repeat(np.arange(USERS), EACH)
    film = np.concatenate([draws.permutation(FILMS)[:EACH] for _ in range(USERS)])
    rating = (tastes[user] * films[film]).sum(1) / 2 + draws.normal(size=len(user)) / 4
    is_test = np.tile(np.arange(EACH) % 6 == 5, USERS)
    arrays = {"vocabulary_user": USERS, "vocabulary_film": FILMS}
    for split, rows in (("train", ~is_test), ("test", is_test)):
        arrays |= {
            f"x_user_{split}": user[rows],
            f"x_film_{split}": film[rows],
            f"y_{split}": rating[rows].astype(np.float32),
            f"owner_{split}": user[rows],
        }
    np.savez("ratings.npz", **arrays)
    print(f"ratings.npz: {(~is_test).sum()} ratings to learn from, {is_test.sum()} to test on")


if __name__ == "__main__":
    main()
