from dataclasses import fields, replace

from megakernel_tts import Sampling
from megakernel_tts.server.fields import sampling_of
from pipecat_service.remote_messages import request_fields
from pipecat_service.settings import default_settings


def test_the_server_reads_every_sampling_parameter() -> None:
    sampling = Sampling(
        temperature=0.7,
        top_k=11,
        top_p=0.8,
        repetition_penalty=1.2,
        predictor_temperature=0.6,
        predictor_top_k=12,
        predictor_top_p=0.7,
        seed=5,
        max_frames=77,
        guard=not Sampling().guard,
    )
    default = Sampling()
    assert all(getattr(sampling, f.name) != getattr(default, f.name) for f in fields(Sampling))
    settings = replace(default_settings("simulated"), sampling=sampling)
    assert sampling_of(request_fields(settings), default) == sampling
