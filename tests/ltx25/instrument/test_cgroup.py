"""Limits of containers, over folders that look like theirs."""

import pytest
from comfyui_ltx25.ltx25.instrument import memory
from comfyui_ltx25.ltx25.instrument.cgroup import group_free

GIB = 1 << 30


def group(folder, names, limit, used, cached=0):
    folder.mkdir(parents=True, exist_ok=True)
    limits, usage, reclaimable = names
    (folder / limits).write_text(f"{limit}\n")
    (folder / usage).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{reclaimable} {cached}\nactive_file 7\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.fixture
def own(tmp_path):
    def write(*lines):
        path = tmp_path / "own"
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return write


def test_a_container_of_version_2_has_its_limit_less_what_it_uses_and_cannot_drop(tmp_path, own):
    mount = tmp_path / "cgroup"
    group(mount, V2, 8 * GIB, 5 * GIB, cached=2 * GIB)
    assert group_free(mount, own("0::/")) == 5 * GIB


def test_the_tightest_of_the_groups_around_a_process_counts(tmp_path, own):
    mount = tmp_path / "cgroup"
    group(mount / "user", V2, 4 * GIB, 3 * GIB)
    group(mount / "user" / "job", V2, "max", 1 * GIB)
    group(mount / "other", V2, 1, 1)
    assert group_free(mount, own("0::/user/job")) == 1 * GIB


def test_a_container_of_version_1_is_read_from_the_memory_controller(tmp_path, own):
    mount = tmp_path / "cgroup"
    group(mount / "memory", V1, 6 * GIB, 2 * GIB, cached=1 * GIB)
    lines = ("5:cpu,cpuacct:/docker/ab", "4:memory:/docker/ab", "0::/")  # the path is the host's, the mount the container's
    assert group_free(mount, own(*lines)) == 5 * GIB
    group(mount / "memory" / "docker" / "ab", V1, 3 * GIB, 3 * GIB)
    assert group_free(mount, own(*lines)) == 0


def test_without_a_limit_or_with_files_that_tell_nothing_there_is_none(tmp_path, own):
    mount = tmp_path / "cgroup"
    group(mount, V2, "max", 5 * GIB)
    assert group_free(mount, own("0::/")) is None
    group(mount, V2, "a lot", 5 * GIB)
    assert group_free(mount, own("0::/")) is None
    assert group_free(mount, tmp_path / "missing") is None


def test_the_host_has_no_more_free_than_the_container(monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", "linux")
    monkeypatch.setattr(memory, "_kib_line", lambda path, name: 64 * GIB)
    for group, told in ((3 * GIB, 3 * GIB), (None, 64 * GIB), (100 * GIB, 64 * GIB)):
        monkeypatch.setattr(memory, "group_free", lambda group=group: group)
        assert memory.host_free() == told
