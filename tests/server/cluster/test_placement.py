import pytest

from megakernel_tts.server.cluster import placement
from megakernel_tts.server.cluster.placement import Gpus, parse_gpus, place_engines


@pytest.mark.parametrize(
    ("option", "gpus"), [("all", "all"), ("0", (0,)), ("0,1", (0, 1)), (" 3, 1", (3, 1))]
)
def test_gpus_are_parsed(option: str, gpus: Gpus) -> None:
    assert parse_gpus(option) == gpus


@pytest.mark.parametrize("option", ["", "a", "0,", "-1", "0;1", "1.0", "ALL", "0,0"])
def test_other_options_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=r"must be all, or the numbers|names a GPU twice"):
        parse_gpus(option)


@pytest.fixture
def num_gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    monkeypatch.setattr(placement, "count_gpus", lambda: request.param)
    return request.param


def visible(gpus: Gpus, environment: dict[str, str]) -> list[tuple[str, str, str]]:
    return [
        (place.name, place.device, place.environment["CUDA_VISIBLE_DEVICES"])
        for place in place_engines(gpus, environment)
    ]


@pytest.mark.parametrize("num_gpus", [4], indirect=True)
def test_each_engine_sees_its_gpu_only(num_gpus: int) -> None:
    assert visible((0, 2), {}) == [("cuda:0", "cuda", "0"), ("cuda:2", "cuda", "2")]
    assert len(visible("all", {})) == num_gpus


@pytest.mark.parametrize("num_gpus", [2], indirect=True)
def test_indices_count_the_gpus_that_the_environment_allows(num_gpus: int) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "3, GPU-5a"}
    assert visible("all", environment) == [("cuda:0", "cuda", "3"), ("cuda:1", "cuda", "GPU-5a")]
    with pytest.raises(ValueError, match="no GPU 2; this process may use 2"):
        place_engines((0, 2), environment)


@pytest.mark.parametrize("num_gpus", [2], indirect=True)
@pytest.mark.parametrize(
    ("environment", "num_threads"), [({}, "1"), ({"OMP_NUM_THREADS": "3"}, "3")]
)
def test_an_engine_on_a_gpu_has_one_thread_on_the_host(
    num_gpus: int, environment: dict[str, str], num_threads: str
) -> None:
    places = place_engines("all", environment)
    assert [p.environment["OMP_NUM_THREADS"] for p in places] == [num_threads] * num_gpus


@pytest.mark.parametrize("num_gpus", [0], indirect=True)
def test_without_a_gpu_as_many_engines_run_on_the_cpu(num_gpus: int) -> None:
    assert [(p.name, p.device) for p in place_engines((4, 7), {})] == [
        ("cpu:0", "cpu"),
        ("cpu:1", "cpu"),
    ]
    assert len(place_engines("all", {})) == 1
    threads = place_engines((0, 1), {"OMP_NUM_THREADS": "3"})[1].environment["OMP_NUM_THREADS"]
    assert threads == "3"
