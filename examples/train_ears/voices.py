"""Many speakers from the teacher's few: random averages of its style tables."""

import random

# English style tables of Kokoro-82M, by accent: (training, held out). `af_nicole`, which whispers,
# and `am_santa` are left out.
_STYLES = {
    "us": (
        (
            "af_alloy", "af_aoede", "af_bella", "af_heart", "af_jessica", "af_kore", "af_nova",
            "af_sarah", "am_adam", "am_echo", "am_fenrir", "am_liam", "am_michael", "am_onyx",
            "am_puck",
        ),
        ("af_river", "af_sky", "am_eric"),
    ),
    "gb": (
        ("bf_alice", "bf_emma", "bf_isabella", "bm_daniel", "bm_fable", "bm_george"),
        ("bf_lily", "bm_lewis"),
    ),
}  # fmt: skip
_SINGLE_SHARE = 0.3  # of speech in one of the teacher's voices
_MOST_PARTS = 4  # of an average; a style may be in it more than once


def draw_style(accent: str, rng: random.Random) -> str:
    """A random speaker: names of styles to be averaged, of both accents, separated by `+`."""
    if rng.random() < _SINGLE_SHARE:
        return rng.choice(_STYLES[accent][0])
    names = [name for training, _ in _STYLES.values() for name in training]
    return "+".join(sorted(rng.choices(names, k=rng.randint(2, _MOST_PARTS))))


def held_out_style(accent: str, index: int) -> str:
    """A speaker that is not in any average."""
    names = _STYLES[accent][1]
    return names[index % len(names)]
