"""Planted bugs: each fits the tree, names a rule that exists, and some are hunted here.

All of them are hunted by `make world-planted`. The slice here uses short worlds without faults, in
processes on patched copies, as the hunt does; it shows that a bug is found, that the same seed is
well without it, and that nobody notices it with the checkers off.
"""

import dataclasses
import shutil

import pytest

from tests.planted import bugs as b
from tests.planted.__main__ import main
from tests.planted.hunt import Hunt, Plan
from tests.planted.rules import RULES, rule_of

BUGS = b.every()
SHORT = {
    "nodes": 5, "racks": 5, "layout": "rs:2,1", "ranks": 3, "jobs": 1, "saves": 4,
    "quiet_saves": 2, "every": 3, "keep_last": 1, "offload_every": 0, "faults": (),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A copy of the tree."""
    tree = tmp_path_factory.mktemp("tree")
    b.copy_tree(tree)
    return tree


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_every_bug_can_be_planted_and_names_its_rule(bug, whole, tmp_path):
    for file in {edit.file for edit in bug.edits}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(whole / file, tmp_path / file)
    b.plant(bug, tmp_path)
    for file in {edit.file for edit in bug.edits}:
        assert (tmp_path / file).read_text() != (whole / file).read_text()
    assert bug.rule in RULES
    assert len(bug.story) > 100
    assert set(bug.ends) <= {"wrong", "crash", "stuck"}


def test_there_are_enough_of_them():
    assert len(BUGS) >= 16
    assert len({bug.rule for bug in BUGS}) >= 10


def test_the_words_of_all_rules_stand_in_the_simulations():
    text = "\n".join(path.read_text() for path in (b.ROOT / "simulations/world").glob("*.py"))
    missing = [word for rule in RULES.values() for word in rule.words if word not in text]
    assert missing == []


def test_the_first_objection_names_the_rule():
    why = "at 3.000 s, job: n1: slot of open or committed 1.2 was removed; step 3 was retired for 0"
    assert rule_of(why) == "freed"
    assert rule_of("something else") == ""


def test_what_does_not_fit_is_not_planted(whole, tmp_path):
    right = b.Bug("x", "story", "bytes", (b.Edit("p2pckpt/errors.py", "nowhere to be found", ""),))
    (tmp_path / "p2pckpt").mkdir()
    shutil.copy(whole / "p2pckpt/errors.py", tmp_path / "p2pckpt/errors.py")
    with pytest.raises(b.NotPlanted, match=r"once in p2pckpt/errors.py, found it 0 times"):
        b.plant(right, tmp_path)
    twice = dataclasses.replace(right, edits=(b.Edit("p2pckpt/errors.py", "class ", ""),))
    with pytest.raises(b.NotPlanted, match=r"found it \d+ times"):
        b.plant(twice, tmp_path)
    broken = b.Edit("p2pckpt/errors.py", "class CheckpointError(", "class CheckpointError((")
    with pytest.raises(b.NotPlanted, match="no Python any more"):
        b.plant(dataclasses.replace(right, edits=(broken,)), tmp_path)
    with pytest.raises(b.NotPlanted, match="into a copy of the tree only"):
        b.plant(right, b.ROOT)
    assert (tmp_path / "p2pckpt/errors.py").read_text() == (whole / "p2pckpt/errors.py").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('story = "s"\nrule = "bytes"\n', "edit"),
        ('story = "s"\n[[edit]]\nfile = "p2pckpt/x.py"\nold = "a"\nnew = "b"\n', "rule"),
        ('story = "s"\nrule = "r"\n[[edit]]\nfile = "simulations/x.py"\nold = "a"\nnew = "b"\n',
         "simulations/x.py is not one of"),
        ("story = ", "Invalid value"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_bug_is_refused(text, message, tmp_path):
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(b.NotPlanted, match=message):
        b.load(tmp_path / "x.toml")


def chosen(*names):
    return [bug for bug in BUGS if bug.name in names]


def test_bugs_are_found_and_a_harmless_change_is_not():
    harmless = b.Edit("p2pckpt/agent/retire.py", "OTHERS_AFTER_S = 5.0", "OTHERS_AFTER_S = 6.0")
    hunted = [
        *chosen("last_step_retired", "receipt_before_record"),
        b.Bug("harmless", "story", "bytes", (harmless,)),
    ]
    told = []
    hunt = Hunt(hunted, Plan(seeds=1, options=SHORT), told.append)
    caught = {catch.bug: catch for catch in hunt.run()}
    retired, receipt = caught["last_step_retired"], caught["receipt_before_record"]
    nothing = caught["harmless"]
    assert (retired.rule, receipt.rule) == ("retired", "bytes"), (retired.why, receipt.why)
    assert retired.found_after_seeds == receipt.found_after_seeds == 1
    assert retired.unseen
    assert receipt.unseen
    assert (nothing.found_after_seeds, nothing.tried, nothing.others) == (0, 1, {})
    assert len(told) == 3
    assert not hunt.folder.exists()


def test_with_all_checkers_off_nothing_is_found():
    plan = Plan(seeds=1, checkers=False, options=SHORT)
    (catch,) = Hunt(chosen("receipt_before_record"), plan, lambda _text: None).run()
    assert (catch.found_after_seeds, catch.tried) == (0, 1)


@pytest.mark.slow
def test_the_command_says_by_its_exit_code_whether_all_were_found(tmp_path, capsys):
    file = tmp_path / "planted.json"
    arguments = ["--only", "receipt_before_record", "--seeds", "1", "--json", str(file)]
    assert main(arguments) == 0
    assert '"found_after_seeds": 1' in file.read_text()
    assert main([*arguments, "--checkers-off"]) == 0
    assert "0 of 1 planted bugs found" in capsys.readouterr().out
