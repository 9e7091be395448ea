"""Writes the corpus, trains its tokenizer, and creates the checkpoint's folder.

python -m examples.train_voice.text WORK --texts 100000
"""

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tqdm import tqdm

from examples.train_voice.grammar import Grammar, lines_of
from examples.train_voice.layout import FULL, TINY, Work, summary, write_folder
from megakernel_tts.text.tokenizer import qwen_pre_tokenizer

_MAX_CHARS = 190
_VOCAB_SIZE = 640  # small, so that pronunciation is learned from little data


def held_out() -> list[tuple[str, str]]:
    """Sentences for evaluation only, each as written and as spoken."""
    pairs = (line.split("\t") for line in lines_of("held_out.txt"))
    return [(pair[0], pair[-1]) for pair in pairs]


def read_words(file: Path) -> list[str]:
    """Words of a word list that consist of ASCII letters; names are capitalised."""
    words = file.read_text(encoding="utf-8").split()
    return [w for w in words if len(w) > 1 and w.isascii() and w.isalpha()]


def make_corpus(texts: int, words: list[str], seed: int) -> list[str]:
    """Generates texts without repeated long ones and without held-out sentences."""
    grammar = Grammar(words, seed)
    forbidden = {text.lower() for text, _ in held_out()}
    seen: set[str] = set()
    corpus: list[str] = []
    with tqdm(total=texts, desc="texts", disable=None) as progress:
        while len(corpus) < texts:
            text = grammar.utterance()
            repeated = text in seen and len(text) > 30
            if repeated or len(text) > _MAX_CHARS or any(f in text.lower() for f in forbidden):
                continue
            seen.add(text)
            corpus.append(text)
            progress.update()
    return corpus


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
    parser.add_argument("work", type=Path, help="the run's folder")
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument(
        "--words", type=Path, default=Path("/usr/share/dict/american-english-small")
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a network that trains in seconds")
    options = parser.parse_args()
    work = Work(options.work)
    work.folder.mkdir(parents=True, exist_ok=True)
    corpus = make_corpus(options.texts, read_words(options.words), options.seed)
    vocab, merges = train_tokenizer(corpus)
    write_folder(work.voice, vocab, merges, TINY if options.tiny else FULL)
    work.corpus.write_text("\n".join(corpus) + "\n", encoding="utf-8")
    print(f"{len(corpus)} texts, {sum(map(len, corpus))} characters, {len(vocab)} tokens")


if __name__ == "__main__":
    main()
