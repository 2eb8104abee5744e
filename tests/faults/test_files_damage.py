"""Any bit flipped, any file cut short or gone, in a store of plain files."""

import functools
import itertools
import os
import random
import re

import pytest

from holdfast.format import rows

from . import bitrot, subjects
from .bitrot import Damage, Removal
from .test_bitrot import Agreeable

pytestmark = pytest.mark.usefixtures("parsed_once")

FLIPS = int(os.environ.get("HOLDFAST_FLIPS", "0")) or 1 << 40  # all there are
SAY = re.compile(r"/(checkpoints|streams)/|/log\.jsonl$")  # the files that say what was saved
subject = functools.cache(functools.partial(subjects.subject, closed=True, backend="files"))


def spots(
    files: dict[str, bytes], several: int, *, flips: bool, seed: str
) -> list[tuple[str, Damage]]:
    """`several` bits or lengths of each file that says what was saved, and one of each other."""
    rng, found = random.Random(seed), list[tuple[str, Damage]]()
    for file, data in files.items():
        wanted = several if SAY.search(file) else max(several // 4, 1)
        every = len(data) * 8 if flips else len(data)
        chosen = set(rng.sample(range(every), min(wanted, every)))
        if flips:
            found += [(file, Damage(bit // 8, bit % 8)) for bit in chosen]
            continue
        ends = [line.end() for line in re.finditer(b"\n", data[:-1])]
        if ends and wanted > 1:  # between lines nothing looks like a cut
            chosen.add(rng.choice(ends))
        found += [(file, Damage(length)) for length in chosen]
    return found


def kind_of(file: str) -> str:
    """Return the path of a file without numbers and hashes: all logs are of one kind."""
    return re.sub(r"[0-9a-f]{8,}|\d+|(?<=sessions/)[^/]+", "", file)


def sample(files: dict[str, bytes], share: int, seed: str) -> dict[str, bytes]:
    """Return one in so many files of each kind, and at least one."""
    rng, kinds = random.Random(seed), dict[str, list[str]]()
    for file in files:
        kinds.setdefault(kind_of(file), []).append(file)
    chosen = {f for fs in kinds.values() for f in rng.sample(fs, -(-len(fs) // share))}
    return {file: data for file, data in files.items() if file in chosen}


CHECKS = [
    ("small", subjects.original_or_error),
    ("small", subjects.repaired),
    ("tidy", subjects.repaired),  # where a lost line of the log may bring back what was deleted
]


@pytest.mark.parametrize(("script", "check"), CHECKS)
@pytest.mark.parametrize("flips", [True, False], ids=["flipped", "cut"])
def test_damaged_files(rounds, flips, script, check):
    known = subject(script=script)
    seed = f"{script} {check.__name__}"
    files = sample(known.files, rounds(4, torture=1), seed)
    several = rounds(2, torture=max(3, FLIPS // len(known.files)))
    damages = spots(files, several, flips=flips, seed=seed)
    assert {kind_of(file) for file, _ in damages} == {*map(kind_of, known.files)}
    report = bitrot.campaigns(known, damages, check)
    print(report)
    assert report.tried == len(damages)
    assert not report.failures, str(report)


def test_each_line_of_a_log():
    """Also those by which something was deleted, or came back."""
    known = subject(script="undone")
    damages = []
    for file, data in known.files.items():
        if file.endswith("/log.jsonl"):
            ends = [0, *[line.end() for line in re.finditer(b"\n", data)]]
            damages += [(file, Damage((a + b) // 2, 3)) for a, b in itertools.pairwise(ends)]
    assert len(damages) >= 14
    report = bitrot.campaigns(known, damages, subjects.repaired)
    print(report)
    assert not report.failures, str(report)


@pytest.mark.parametrize(("script", "check"), CHECKS)
def test_missing_files(rounds, script, check):
    known = subject(script=script)
    files = sample(known.files, rounds(3, torture=1), script)
    report = bitrot.campaigns(known, [(file, Removal()) for file in files], check)
    print(report)
    assert not report.failures, str(report)


def test_mutant_that_does_not_compare_digests(monkeypatch):
    known = subject(script="small")
    monkeypatch.setattr(rows, "xxh3_64_digest", lambda body, seed: Agreeable(8))
    [stream] = [file for file in known.files if "/streams/" in file]
    damages = [(stream, flip) for flip in bitrot.flips(known.files[stream], 30)]
    told = "a different answer"
    report = bitrot.campaigns(known, damages, subjects.original_or_error, until=told)
    print(report)
    assert any(told in found for found in report.failures)
