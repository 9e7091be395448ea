"""The order in which the stages of the voice recipe run, and what happens when one fails."""

import itertools
from pathlib import Path

import pytest

from examples.train_voice.layout import Work
from examples.train_voice.run import Stage, StageError, gpus_of, run_stages, stages


class Stages:
    """Simulated stages that take two ticks each, a failing one takes one; their starts and ends."""

    def __init__(self, failing: str | None = None) -> None:
        self.tick = 0
        self.events: list[tuple[str, str]] = []  # (start, end or terminate; name)
        self._failing = failing

    def start(self, stage: Stage) -> "Simulated":
        self.events.append(("start", stage.name))
        num_ticks = 1 if stage.name == self._failing else 2
        return Simulated(self, stage.name, self.tick + num_ticks)

    def advance(self, _seconds: float) -> None:
        self.tick += 1

    def status(self, name: str) -> int:
        return 1 if name == self._failing else 0

    def index(self, event: str, name: str) -> int:
        return self.events.index((event, name))


class Simulated:
    """A stage that ends at a tick."""

    def __init__(self, owner: Stages, name: str, end: int) -> None:
        self._owner, self._name, self._end = owner, name, end

    def poll(self) -> int | None:
        if self._owner.tick < self._end:
            return None
        if ("end", self._name) not in self._owner.events:
            self._owner.events.append(("end", self._name))
        return self._owner.status(self._name)

    def terminate(self) -> None:
        self._owner.events.append(("terminate", self._name))


def recipe(folder: Path, num_gpus: int = 2) -> list[Stage]:
    return stages(Work(folder), folder / "teacher", num_gpus)


def minutes(stage: Stage) -> float:
    """The time that a stage's command sets; a minute for the stages whose time is not set."""
    options = dict(itertools.pairwise(stage.command))
    return float(options.get("--minutes", 1.0))


@pytest.mark.parametrize("num_gpus", [1, 2, 3])
def test_a_stage_starts_when_those_it_depends_on_have_ended(tmp_path: Path, num_gpus: int) -> None:
    simulated, all_stages = Stages(), recipe(tmp_path, num_gpus)
    seconds = run_stages(
        all_stages,
        simulated.start,
        lambda line: None,
        num_gpus=num_gpus,
        wait=simulated.advance,
        clock=lambda: float(simulated.tick),
    )
    assert set(seconds) == {stage.name for stage in all_stages}
    for stage in all_stages:
        for name in stage.after:
            assert simulated.index("end", name) < simulated.index("start", stage.name)
    # The codec begins with the first recordings, the speech beside the calibration. The vocoder has
    # a GPU of its own if there are two.
    assert simulated.index("start", "codec") < simulated.index("end", "synthesis")
    assert simulated.index("start", "speak") < simulated.index("end", "calibrate")
    if num_gpus == 1:
        may_share = {stage.name for stage in all_stages if stage.shares}
        assert may_share == {"codec", "truth", "calibrate", "speak"}
        running = set[str]()
        for event, name in simulated.events:
            assert event == "end" or name in may_share or not running
            running ^= {name}
    is_beside = simulated.index("start", "vocoder") < simulated.index("end", "codes")
    assert is_beside == (num_gpus > 1)


@pytest.mark.parametrize("num_gpus", [1, 2, 3])
def test_all_stages_take_less_than_half_an_hour(tmp_path: Path, num_gpus: int) -> None:
    """Of the stages that do not wait for each other the slower one counts."""
    end = dict[str, float]()
    for stage in recipe(tmp_path, num_gpus):
        before = list(end) if num_gpus == 1 and not stage.shares else stage.after
        end[stage.name] = minutes(stage) + max((end[name] for name in before), default=0)
    assert 25 < max(end.values()) < 30


@pytest.mark.parametrize(
    ("num_gpus", "failing", "beside", "next_stage"),
    [(2, "codes", "vocoder", "talker"), (1, "truth", "speak", "calibrate")],
)
def test_a_stage_that_fails_ends_the_others(
    tmp_path: Path, num_gpus: int, failing: str, beside: str, next_stage: str
) -> None:
    simulated = Stages(failing)
    with pytest.raises(StageError, match=f"stage {failing} ended with status 1"):
        run_stages(
            recipe(tmp_path, num_gpus),
            simulated.start,
            lambda line: None,
            num_gpus=num_gpus,
            wait=simulated.advance,
            clock=lambda: float(simulated.tick),
        )
    started = {name for event, name in simulated.events if event == "start"}
    assert next_stage not in started
    assert ("terminate", beside) in simulated.events
    ended = {name for event, name in simulated.events if event in ("end", "terminate")}
    assert started == ended


@pytest.mark.parametrize("num_gpus", [1, 2, 3])
def test_each_stage_is_a_module_of_the_recipe_that_has_its_options(
    tmp_path: Path, num_gpus: int
) -> None:
    folder = Path(__file__).parents[1] / "examples/train_voice"
    for stage in recipe(tmp_path, num_gpus):
        package, _, name = stage.command[1].rpartition(".")
        if not package:  # `calibrate` is a command of megakernel_tts
            continue
        source = (folder / f"{name}.py").read_text()
        for option in stage.command[2:]:
            assert not option.startswith("--") or f'"{option}"' in source, f"{name} {option}"


@pytest.mark.parametrize("num_gpus", [1, 2, 4])
def test_stages_share_no_gpu_that_would_delay_them(tmp_path: Path, num_gpus: int) -> None:
    """The talker has all GPUs but that of the vocoder, and a process for each."""
    names = ["3", "5", "6", "7"][:num_gpus]
    chosen = {s.name: list(gpus_of(s, names)) for s in recipe(tmp_path, num_gpus)}
    assert chosen["codec"] == chosen["codes"] == ["3"]
    assert chosen["vocoder"] == chosen["synthesis"] == [names[min(1, num_gpus - 1)]]
    assert chosen["talker"] == ["3", *names[2:]]
    (talker,) = (s for s in recipe(tmp_path, num_gpus) if s.name == "talker")
    options = dict(itertools.pairwise(talker.command))
    assert options["--processes"] == str(len(chosen["talker"]))
