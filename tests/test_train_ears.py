"""Training of the small recogniser: its losses, its network and its stages at a tiny size."""

import itertools
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from examples.train_ears import lattice
from examples.train_ears import net as net_module
from examples.train_ears.export import quantise
from examples.train_ears.features import LogMel
from examples.train_ears.lattice import NEVER, ctc_likelihood, path_sum, transducer_likelihood
from examples.train_ears.layout import FULL, LOOKAHEADS, TINY, Work, write_folder
from examples.train_ears.net import Net
from examples.train_ears.targets import target
from examples.train_ears.tokenizer import train_tokenizer
from examples.train_voice.training import bind
from megakernel_stt.model.checkpoint import Model
from megakernel_stt.model.config import read_model_config
from megakernel_stt.model.weights import Weights, model_specs
from megakernel_stt.network.features import LogMel as EngineLogMel
from megakernel_stt.network.transducer import Transducer
from megakernel_stt.text.tokenizer import Tokenizer
from tests.stt.streams import encode

CPU = torch.device("cpu")
SENTENCES = ["hello world", "we are here", "it's an overfit test", "one two three"]


def make_net(folder: Path, seed: int = 0) -> Net:
    """A tiny network with random weights, its checkpoint's folder without tensors."""
    torch.manual_seed(seed)
    work = Work(folder)
    write_folder(work.ears, train_tokenizer(SENTENCES, TINY.vocab), TINY)
    return Net(work.config(), CPU)


def as_model(net: Net) -> Model:
    """The engine's model with the network's parameters."""
    tensors = {name: net.parameters[name].detach() for name in net.names}
    weights: Weights = bind(model_specs(net.config), tensors)
    vocab_size = net.config.transducer.vocab_size
    return Model(net.config, weights, Tokenizer([""] * vocab_size))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sum_of_alignments(blank: Tensor, label: Tensor) -> float:
    """Log-likelihood of all alignments of a text, one by one.

    Args:
        blank: [frames, labels + 1].
        label: [frames, labels].
    """
    frames, labels = label.shape
    total = 0.0
    # An alignment ends with the last frame's blank; the labels lie anywhere before it.
    for places in itertools.combinations(range(frames + labels - 1), labels):
        frame = count = 0
        score = 0.0
        for step in range(frames + labels):
            if step in places:
                score += label[frame, count].item()
                count += 1
            else:
                score += blank[frame, count].item()
                frame += 1
        assert (frame, count) == (frames, labels)
        total += math.exp(score)
    return math.log(total)


@pytest.mark.parametrize("most_frames", [1, 2, 5])
@pytest.mark.parametrize("most_labels", [0, 1, 3])
def test_the_transducers_likelihood_is_the_sum_over_all_alignments(
    most_frames: int, most_labels: int
) -> None:
    """In ragged batches of all numbers of frames and labels."""
    sizes = [*itertools.product(range(1, most_frames + 1), range(most_labels + 1))]
    frames, labels = (torch.tensor(column) for column in zip(*sizes, strict=True))
    blank = draw(len(sizes), most_frames, most_labels + 1)
    label = draw(len(sizes), most_frames, most_labels, seed=1)
    found = transducer_likelihood(blank, label, frames, labels)
    for i, (t, u) in enumerate(sizes):
        assert found[i].item() == pytest.approx(
            sum_of_alignments(blank[i, :t, : u + 1], label[i, :t, :u]), abs=1e-5
        )


def test_the_likelihood_of_ctc_is_that_of_torch() -> None:
    """In a ragged batch with repeated labels, an empty text and one that does not fit."""
    scores = draw(5, 9, 6).log_softmax(-1)
    tokens = torch.tensor([[1, 1, 2, 3], [0, 4, 0, 4], [2, 2, 2, 0], [0, 0, 0, 0], [3, 3, 3, 3]])
    frames, labels = torch.tensor([9, 7, 5, 4, 6]), torch.tensor([4, 4, 3, 0, 4])
    found = ctc_likelihood(scores, tokens, frames, labels)
    golden = -F.ctc_loss(scores.mT.permute(2, 0, 1), tokens, frames, labels, 5, reduction="none")
    torch.testing.assert_close(found[:4], golden[:4], rtol=1e-5, atol=1e-5)
    assert golden[4] == -math.inf and found[4] < NEVER / 2


@pytest.mark.parametrize("kinds", [2, 3])
def test_gradients_of_path_sums_match_finite_differences(kinds: int) -> None:
    moves = draw(6, kinds, 2, 4).double().requires_grad_()
    final = torch.full((2, 4), NEVER, dtype=torch.float64)
    final[0, 3] = final[1, 1] = final[1, 2] = 0
    assert torch.autograd.gradcheck(lambda x: path_sum(x, final), moves)


def test_gradients_of_a_lattice_match_finite_differences() -> None:
    """In a ragged batch; what is outside a text or recording has no gradient."""
    blank, label = (draw(2, 4, n, seed=n).double().requires_grad_() for n in (4, 3))
    frames, labels = torch.tensor([4, 2]), torch.tensor([2, 3])
    assert torch.autograd.gradcheck(
        lambda b, e: transducer_likelihood(b, e, frames, labels), (blank, label)
    )
    transducer_likelihood(blank, label, frames, labels).sum().backward()
    assert blank.grad is not None and label.grad is not None
    assert (blank.grad[1, 2:] == 0).all() and (label.grad[0, :, 2:] == 0).all()
    assert torch.isfinite(blank.grad).all() and blank.grad[0, 3, 2] == 1


def test_an_impossible_text_has_no_gradient() -> None:
    scores = draw(2, 3, 4).requires_grad_()
    tokens = torch.tensor([[1, 1, 1], [1, 2, 1]])
    likelihood = ctc_likelihood(scores, tokens, torch.tensor([3, 3]), torch.tensor([3, 3]))
    likelihood.clamp(min=NEVER / 2).sum().backward()
    assert scores.grad is not None
    assert (scores.grad[0] == 0).all() and (scores.grad[1] != 0).any()


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_the_network_in_training_is_the_engines(lookahead: int, tmp_path: Path) -> None:
    """Frames of a ragged batch equal those that the engine streams, for many lengths."""
    net = make_net(tmp_path)
    model, lengths = as_model(net), torch.tensor([1, 2, 7, 8, 9, 65, 130, 333, 400])
    mels = 3 * draw(len(lengths), 400, TINY.mels) - 8
    mels *= (torch.arange(400) < lengths[:, None])[..., None]
    net.calibrate(mels, lengths)
    with torch.no_grad():
        frames, counts = net.encode(mels, lengths, torch.tensor(lookahead))
        for i, length in enumerate(lengths.tolist()):
            streamed = encode(model, mels[i, :length], lookahead)
            assert len(streamed) == counts[i]
            torch.testing.assert_close(frames[i, : len(streamed)], streamed, rtol=0, atol=1e-5)


def test_the_transducer_in_training_is_the_engines(tmp_path: Path) -> None:
    """The engine's greedy tokens are those of highest probability at each node of their path."""
    net = make_net(tmp_path)
    with torch.no_grad():
        net.parameters["joint.head.weight"].mul_(80)
        net.parameters["joint.head.bias"][net.config.transducer.blank_id] += 10
    frames, model = draw(1, 40, TINY.hidden), as_model(net)
    transducer = Transducer(model.weights.transducer, model.config.transducer)
    (found,), _ = transducer.decode(frames, [40], transducer.start())
    assert len({emission.token for emission in found}) > 3
    symbols = Counter(emission.frame for emission in found)
    full = {f for f, count in symbols.items() if count == net.config.transducer.max_symbols}
    tokens = torch.tensor([[emission.token for emission in found]])
    with torch.no_grad():
        blank, label = net.transducer_scores(frames, tokens)
    for i, emission in enumerate(found):
        assert label[0, emission.frame, i] > blank[0, emission.frame, i]
        before = found[i - 1].frame if i else 0
        # Frames that ended with a blank, not by their number of tokens.
        ended = [f for f in range(before, emission.frame) if f > before or f not in full]
        assert (blank[0, ended, i] >= label[0, ended, i]).all()
    total = torch.cat([blank[..., :-1].exp(), label.exp()], -1)
    assert (total.view(1, 40, 2, -1).sum(2) <= 1 + 1e-5).all()


def test_features_in_training_are_the_engines() -> None:
    engine, mels = EngineLogMel(80, CPU), LogMel(80, CPU)
    for samples in (160, 8000, 16_001):
        wave = 0.1 * draw(samples)
        golden = engine.recording(wave.numpy())
        found = mels(F.pad(wave, (0, 400))[None], torch.tensor([samples]))[0, : len(golden)]
        torch.testing.assert_close(found, golden, rtol=0, atol=1e-4)


def test_training_begins_with_the_tokens_frequencies(tmp_path: Path) -> None:
    """Of the steps of CTC a fifth has a token, four of five times the same one."""
    net = make_net(tmp_path)
    counts = torch.zeros(net.config.transducer.vocab_size)
    counts[3], counts[5] = 799, 199
    net.initialise_heads(100 * counts, 500_000.0)
    net.parameters["joint.head.weight"].data.zero_()
    nothing, blank = torch.zeros(1, 4, TINY.hidden), net.config.transducer.blank_id
    by_ctc = net.ctc_scores(nothing).exp()[0, 0]
    torch.testing.assert_close(
        by_ctc[[blank, 3, 5]], torch.tensor([0.8, 0.16, 0.04]), rtol=0.02, atol=0
    )
    blanks, labels = net.transducer_scores(nothing, torch.tensor([[3, 5, 3]]))
    assert blanks.exp().mean().item() == pytest.approx(5 / 6, rel=0.01)
    assert labels[..., 0].exp().mean().item() == pytest.approx(0.8 / 6, rel=0.01)


def test_the_first_block_sees_normalised_frames_that_differ(tmp_path: Path) -> None:
    """Frames that are nearly equal at the start remain so: the encoder has no gradient then."""
    net, lengths = make_net(tmp_path), torch.tensor([300, 400])
    mels = 3 * draw(2, 400, TINY.mels) - 8
    net.calibrate(mels, lengths)
    x, counts = net._subsample(mels, lengths)
    x = torch.cat([x[0, : counts[0]], x[1, : counts[1]]])
    torch.testing.assert_close(x.mean(0), torch.zeros(TINY.hidden), rtol=0, atol=1e-4)
    torch.testing.assert_close(x.std(0, correction=0), torch.ones(TINY.hidden), rtol=0, atol=1e-4)
    frames, counts = net.encode(mels, lengths, torch.tensor(1))
    frames = frames[1, : counts[1]]
    assert frames.std(0).mean() > 0.96 * frames.std()  # 0.9 with residual branches of full size


def test_the_full_checkpoint_is_small_enough(tmp_path: Path) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(pair) for pair in itertools.product(letters, repeat=3)]
    write_folder(tmp_path, train_tokenizer([" ".join(words)], FULL.vocab), FULL)
    net = Net(read_model_config(tmp_path), CPU)
    assert net.config.transducer.vocab_size == FULL.vocab
    stored = (quantise(name, net.parameters[name].detach()) for name in net.names)
    assert sum(tensor.nbytes for tensors in stored for tensor in tensors.values()) < 20e6


def test_targets_are_spoken_words() -> None:
    assert target("It's $3.50, Dr. Smith!") == "it's three dollars and fifty cents doctor smith"
    assert target("The API’s café—at 8:15 p.m.") == "the a p i's cafe at eight fifteen p m"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_fused_functions_have_the_values_and_gradients_of_unfused_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For several shapes, of which all but the first are not those of the compilation."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    device = torch.device("cuda")
    net = Net(make_net(tmp_path).config, device)
    tokens = torch.randint(0, net.config.transducer.vocab_size - 1, (4, 12), device=device)

    def run(num_streams: int, mel_frames: int, num_labels: int) -> list[Tensor]:
        torch.manual_seed(0)
        mels = torch.randn(num_streams, mel_frames, TINY.mels, device=device)
        lengths = torch.tensor([mel_frames, mel_frames - 40, 200], device=device)[:num_streams]
        texts = tokens[:num_streams, :num_labels]
        labels = torch.full_like(lengths, num_labels)
        frames, counts = net.encode(mels, lengths, torch.tensor(1, device=device))
        blank, label = net.transducer_scores(frames, texts)
        losses = transducer_likelihood(blank, label, counts, labels)
        by_ctc = ctc_likelihood(net.ctc_scores(frames), texts, counts, labels)
        parameters = [*net.parameters.values()]
        return [losses, by_ctc, *torch.autograd.grad((losses + by_ctc).sum(), parameters)]

    shapes = (3, 300, 9), (2, 260, 12), (3, 411, 5)
    fused = [run(*shape) for shape in shapes]
    for module in (net_module, lattice):
        monkeypatch.setattr(module, "fused", lambda function, _: function)
    for shape, found in zip(shapes, fused, strict=True):
        for value, expected in zip(found, run(*shape), strict=True):
            scale = float(expected.abs().max()) + 1e-3
            torch.testing.assert_close(value / scale, expected / scale, rtol=0, atol=1e-4)
