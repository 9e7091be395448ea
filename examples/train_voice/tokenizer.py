"""Trains the tokenizer on the corpus, and creates the checkpoint's folder.

python -m examples.train_voice.tokenizer WORK
"""

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from examples.train_voice.layout import FULL, TINY, Work, summary, write_folder
from megakernel_tts.text.tokenizer import qwen_pre_tokenizer

_VOCAB_SIZE = 768  # small, so that pronunciation is learned from little data


def train_tokenizer(corpus: list[str]) -> tuple[dict[str, int], list[str]]:
    """Trains a small byte-level BPE with Qwen's pre-tokenizer; gives vocabulary and merges."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = qwen_pre_tokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The role's name is one token in every checkpoint.
    bpe.train_from_iterator([*corpus, *["assistant", "user"] * (len(corpus) // 8)], trainer)
    model = json.loads(bpe.to_str())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return model["vocab"], merges


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `text`")
    parser.add_argument("--tiny", action="store_true", help="a network that trains in seconds")
    options = parser.parse_args()
    work = Work(options.work)
    vocab, merges = train_tokenizer(work.texts())
    write_folder(work.voice, vocab, merges, TINY if options.tiny else FULL)
    print(f"{len(vocab)} tokens")


if __name__ == "__main__":
    main()
