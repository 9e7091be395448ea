"""Trains the tokenizer on the targets, and creates the checkpoint's folder.

python -m examples.train_ears.tokenizer WORK
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.train_ears.layout import FULL, TINY, Work, write_folder
from examples.train_voice.layout import summary

_LETTERS = [*"abcdefghijklmnopqrstuvwxyz'"]


def train_tokenizer(targets: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a BPE whose pieces begin words as those of SentencePiece do.

    Args:
        targets: Lines of lower-case words.
        vocab_size: Most ids, blank included, which is the last.
    """
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    bpe.decoder = decoders.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=[*_LETTERS, "▁"],
        special_tokens=["<unk>"],
        show_progress=False,
    )
    bpe.train_from_iterator(targets, trainer)
    bpe.add_special_tokens([AddedToken("<blank>", special=True)])
    return bpe


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `text`")
    parser.add_argument("--tiny", action="store_true", help="a network that trains in seconds")
    options = parser.parse_args()
    work, sizes = Work(options.work), TINY if options.tiny else FULL
    targets = work.targets.read_text(encoding="utf-8").splitlines()
    tokenizer = train_tokenizer(targets, sizes.vocab)
    write_folder(work.ears, tokenizer, sizes)
    words = sum(len(line.split()) for line in targets)
    tokens = sum(len(one.ids) for one in tokenizer.encode_batch(targets))
    print(f"{tokenizer.get_vocab_size()} ids, {tokens / words:.2f} tokens per word")


if __name__ == "__main__":
    main()
