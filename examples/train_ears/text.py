"""Writes the corpus: English texts, their accents, and what the recogniser shall write.

The corpus has the format of the voice's recipe, whose `pronunciation` reads it.

python -m examples.train_ears.text WORK --texts 160000
"""

import argparse
import random
from pathlib import Path

from tqdm import tqdm

from examples.train_ears.layout import Work
from examples.train_ears.targets import target
from examples.train_voice import sources
from examples.train_voice.layout import Work as VoiceWork
from examples.train_voice.layout import summary
from examples.train_voice.text import Sources, contains_held_out, is_suitable

# Other shares than in the voice's corpus: the prediction network would learn the templates of
# `replies` and `grammar`. Most of the texts of WordNet and of the novels are used.
_SHARES = {
    "replies": 22, "notation": 8, "grammar": 8, "novels": 9, "verses": 11, "examples": 30,
    "words": 12,
}  # fmt: skip
_ACCENTS = {"clara": 0.7, "olivia": 0.3}  # voices of the voice's recipe: American, British
_MAX_CHARS = 260  # of speech that is not longer than the longest batch


def make_corpus(texts: int, seed: int, root: Path = sources.DEBIAN) -> list[tuple[str, str, str]]:
    """Generates texts without repeated ones and without held-out sentences.

    Returns:
        Voice that has the text's accent, text, and what the recogniser shall write; shuffled.
    """
    rng, pool = random.Random(seed), Sources("english", seed, root)
    kinds, shares = zip(*_SHARES.items(), strict=True)
    found: dict[str, tuple[str, str]] = {}
    with tqdm(total=texts, desc="texts", disable=None) as progress:
        while len(found) < texts:
            text = " ".join(pool.text(rng.choices(kinds, shares)[0]).split())
            if len(text) > _MAX_CHARS or text in found or not is_suitable(text):
                continue
            if contains_held_out(text) or not (written := target(text)):
                continue
            (voice,) = rng.choices([*_ACCENTS], [*_ACCENTS.values()])
            found[text] = voice, written
            progress.update()
    corpus = [(voice, text, written) for text, (voice, written) in found.items()]
    rng.shuffle(corpus)
    return corpus


def write_corpus(work: Work, corpus: list[tuple[str, str, str]]) -> None:
    """Writes voices, texts and targets."""
    work.folder.mkdir(parents=True, exist_ok=True)
    VoiceWork(work.folder).write_corpus([(voice, text) for voice, text, _ in corpus])
    lines = (f"{written}\n" for _, _, written in corpus)
    work.targets.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder")
    parser.add_argument("--texts", type=int, default=160_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--root", type=Path, default=sources.DEBIAN, help="folder of the Debian packages' files"
    )
    options = parser.parse_args()
    corpus = make_corpus(options.texts, options.seed, options.root)
    write_corpus(Work(options.work), corpus)
    words = sum(len(written.split()) for _, _, written in corpus)
    print(f"{len(corpus)} texts, {words} words")


if __name__ == "__main__":
    main()
