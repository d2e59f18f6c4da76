from __future__ import annotations

import os
import stat
import threading
import time

from fedsim.deploy.bell import Bell, ring


def test_who_rings_wakes_who_listens(tmp_path):
    bell = Bell(tmp_path)
    threading.Timer(0.1, ring, [tmp_path]).start()
    began = time.monotonic()
    bell.wait(60)
    assert time.monotonic() - began < 50


def test_a_bell_that_was_rung_before_anybody_listened_is_heard_once(tmp_path):
    bell = Bell(tmp_path)
    for _ in range(3):
        ring(tmp_path)
    bell.wait(60)
    began = time.monotonic()
    bell.wait(0.05)
    assert time.monotonic() - began >= 0.05


def test_ringing_where_nobody_listens_does_nothing(tmp_path):
    ring(tmp_path)
    os.mkfifo(tmp_path / "task.pipe")
    ring(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["task.pipe"]


def test_a_bell_takes_the_place_of_whatever_lies_there_and_is_its_owners(tmp_path):
    (tmp_path / "task.pipe").write_text("left")
    Bell(tmp_path)
    ring(tmp_path)
    mode = (tmp_path / "task.pipe").stat().st_mode
    assert stat.S_ISFIFO(mode)
    assert mode & 0o777 == 0o600


def test_a_bell_that_is_rung_for_ever_without_a_listener_does_not_block_who_rings(tmp_path):
    bell = Bell(tmp_path)
    for _ in range(70_000):
        ring(tmp_path)
    bell.wait(60)
