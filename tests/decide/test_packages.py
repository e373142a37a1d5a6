"""Which package, with which command, on every recorded system; and the sentences when there is no way."""
from __future__ import annotations

import pathlib

import pytest

from llmgw.decide import packages
from llmgw.decide.packages import DEBIAN, RED_HAT, SUSE, Ways
from llmgw.domain.node import OsRelease
from llmgw.domain.requirement import Library
from llmgw.parse.os_release import os_release

OS_FILES = sorted((pathlib.Path(__file__).parent.parent / "data" / "os_release").iterdir())
GOMP, STDCXX, OLD = Library("libgomp.so.1"), Library("libstdc++.so.6"), Library("libc.so.6", "GLIBC_2.38")

# the beginning of a recorded file's name -> family, what such a system has, what is run, the package
EXPECTED = {
    "debian": (DEBIAN, ("apt-get",), "apt-get", "libgomp1"),
    "ubuntu": (DEBIAN, ("apt-get",), "apt-get", "libgomp1"),
    "raspbian": (DEBIAN, ("apt-get",), "apt-get", "libgomp1"),
    "linuxmint": (DEBIAN, ("apt-get",), "apt-get", "libgomp1"),
    "pop_os": (DEBIAN, ("apt-get",), "apt-get", "libgomp1"),
    "kali": (DEBIAN, ("apt-get",), "apt-get", "libgomp1"),
    "alma": (RED_HAT, ("dnf", "yum"), "dnf", "libgomp"),
    "amazon_2023": (RED_HAT, ("dnf", "yum"), "dnf", "libgomp"),
    "amazon_2018": (RED_HAT, ("yum",), "yum", "libgomp"),
    "amazon_2": (RED_HAT, ("yum",), "yum", "libgomp"),
    "centos_7": (RED_HAT, ("yum",), "yum", "libgomp"),
    "centos": (RED_HAT, ("dnf", "yum"), "dnf", "libgomp"),
    "clearos": (RED_HAT, ("yum",), "yum", "libgomp"),
    "fedora": (RED_HAT, ("dnf", "yum"), "dnf", "libgomp"),
    "oracle": (RED_HAT, ("dnf", "yum"), "dnf", "libgomp"),
    "redhat": (RED_HAT, ("dnf", "yum"), "dnf", "libgomp"),
    "rocky": (RED_HAT, ("dnf", "yum"), "dnf", "libgomp"),
    "opensuse": (SUSE, ("zypper",), "zypper", "libgomp1"),
    "sled": (SUSE, ("zypper",), "zypper", "libgomp1"),
    "sles": (SUSE, ("zypper",), "zypper", "libgomp1"),
    "suse-microos": (SUSE, ("zypper",), "zypper", "libgomp1"),
}
OTHERS = {
    "alpine": "sudo apk add libgomp", "arch": "sudo pacman -S --needed gcc-libs",
    "endeavouros": "sudo pacman -S --needed gcc-libs", "manjaro": "sudo pacman -S --needed gcc-libs",
    "clearlinux": "sudo swupd bundle-add c-basic",
}


def of(name, table):
    return max((key for key in table if name.startswith(key)), key=len, default=None)


def test_there_are_92_recorded_systems_and_each_is_expected_somewhere():
    assert len(OS_FILES) == 92
    assert all(bool(of(path.name, EXPECTED)) != bool(of(path.name, OTHERS)) for path in OS_FILES)


@pytest.mark.parametrize("path", [path for path in OS_FILES if of(path.name, EXPECTED)], ids=lambda path: path.name)
def test_every_recorded_system_of_the_three_families_gets_its_package_with_its_command(path):
    family, managers, program, package = EXPECTED[of(path.name, EXPECTED)]
    ways = Ways(os_release(path.read_bytes()), managers, root=True)
    assert packages.family(ways) is family
    plan = packages.for_libraries(ways, [GOMP])
    assert plan.packages == (package,) and plan.why_not == ""
    assert plan.argv[0] == program and "install" in plan.argv and plan.argv[-1] == package
    assert plan.by_hand == f"{program} install -y {package}"
    compiler = packages.for_compiler(ways)
    assert compiler.packages == (("gcc", "libc6-dev") if family is DEBIAN else ("gcc", "glibc-devel"))


@pytest.mark.parametrize("path", [path for path in OS_FILES if of(path.name, OTHERS)], ids=lambda path: path.name)
def test_a_system_of_no_family_is_told_so_with_its_name_and_its_own_command(path):
    release = os_release(path.read_bytes())
    plan = packages.for_libraries(Ways(release, (), root=False), [GOMP])
    assert plan.argv == () and plan.by_hand == OTHERS[of(path.name, OTHERS)]
    assert packages.sentence([GOMP], plan) == (
        "libgomp.so.1 is missing; llmgw installs packages with apt-get, dnf, yum or zypper, and "
        f"{release.pretty_name} has none of them")


@pytest.mark.parametrize("path", [path for path in OS_FILES if of(path.name, OTHERS)], ids=lambda path: path.name)
def test_a_foreign_package_manager_on_such_a_system_is_not_used(path):
    """apt-get can be installed on Arch; it knows nothing there."""
    assert packages.manager(Ways(os_release(path.read_bytes()), packages.MANAGERS)) == ""


UNKNOWN = OsRelease("hobby", ("hobbies",), "1", "Hobby OS 1")


@pytest.mark.parametrize("managers, package", [
    (("apt-get",), "libgomp1"), (("dnf", "yum"), "libgomp"), (("yum",), "libgomp"), (("zypper",), "libgomp1")])
def test_an_unknown_system_is_taken_for_what_its_package_manager_says(managers, package):
    plan = packages.for_libraries(Ways(UNKNOWN, managers, root=True), [GOMP])
    assert plan.packages == (package,) and plan.argv[0] == managers[0]


def test_an_id_wins_over_id_like_and_the_first_known_id_like_over_the_later():
    assert packages.family(Ways(OsRelease("fedora", ("debian",)))) is RED_HAT
    assert packages.family(Ways(OsRelease("x", ("y", "suse", "debian")))) is SUSE


@pytest.mark.parametrize("root, allowed, words, command", [
    (False, True, "and llmgw does not run as root here", "sudo apt-get install -y libgomp1"),
    (True, False, "and install_packages is false in agent.yaml", "apt-get install -y libgomp1"),
    (False, False, "and install_packages is false in agent.yaml", "sudo apt-get install -y libgomp1"),
])
def test_who_may_not_install_is_told_the_package_the_reason_and_the_command(root, allowed, words, command):
    plan = packages.for_libraries(Ways(OsRelease("debian"), ("apt-get",), root, allowed), [GOMP])
    assert plan.argv == () and plan.by_hand == command
    assert packages.sentence([GOMP], plan) == f"libgomp.so.1 is missing: package libgomp1 brings it, {words}"


def test_two_libraries_of_one_package_and_of_two():
    ways = Ways(OsRelease("debian"), ("apt-get",), root=True)
    both = [GOMP, STDCXX]
    assert packages.sentence(both, packages.for_libraries(ways, both)) == (
        "libgomp.so.1 is missing; libstdc++.so.6 is missing: packages libgomp1 and libstdc++6 bring them")
    ssl = [Library("libssl.so.3"), Library("libcrypto.so.3")]
    plan = packages.for_libraries(ways, ssl)
    assert plan.packages == ("libssl3",)
    assert packages.sentence(ssl, plan).endswith(": package libssl3 brings them")


def test_a_library_that_is_not_in_the_table_is_searched_for_by_a_person():
    odd = [Library("libodd.so.7")]
    for release, managers, command in ((OsRelease("debian"), ("apt-get",), "apt-file search libodd.so.7"),
                                       (OsRelease("rhel"), ("dnf",), "dnf provides '*/libodd.so.7'"),
                                       (OsRelease("sles"), ("zypper",), "zypper search --provides libodd.so.7")):
        plan = packages.for_libraries(Ways(release, managers, root=True), odd)
        assert (plan.argv, plan.by_hand) == ((), command)
        assert packages.sentence(odd, plan) == (
            "libodd.so.7 is missing; which package brings libodd.so.7 is not known to llmgw")


def test_debian_10_calls_libgcc_by_its_old_name():
    gcc = [Library("libgcc_s.so.1")]
    for version, package in (("10", "libgcc1"), ("12", "libgcc-s1"), ("", "libgcc-s1")):
        ways = Ways(OsRelease("debian", version_id=version), ("apt-get",), root=True)
        assert packages.for_libraries(ways, gcc).packages == (package,)


def test_only_apt_fetches_its_lists_in_a_step_of_its_own_and_no_package_is_removed():
    plan = packages.for_libraries(Ways(OsRelease("debian"), ("apt-get",), root=True), [GOMP])
    assert plan.refresh == ("apt-get", "update") and "--no-remove" in plan.argv
    assert packages.for_libraries(Ways(OsRelease("sles"), ("zypper",), root=True), [GOMP]).refresh == ()
