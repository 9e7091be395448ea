"""The codec in training: its operations, its losses and its discriminators."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from examples.train_voice import codec_model
from examples.train_voice.codec_net import Quantizer
from examples.train_voice.discriminators import (
    Discriminators,
    adversarial_loss,
    discriminator_loss,
    feature_loss,
)
from examples.train_voice.layout import TINY, Work, write_folder
from examples.train_voice.operations import conv, snake, transposed
from examples.train_voice.phone_recogniser import PhoneRecogniser
from examples.train_voice.spectral import Spectra
from examples.train_voice.speech import FRAME, SAMPLE_RATE
from examples.train_voice.tokenizer import train_tokenizer
from megakernel_tts.codec import weights as w


@pytest.mark.parametrize(
    ("out", "kernel", "dilation", "stride", "groups", "replicate"),
    [
        (7, 7, 3, 1, 1, False),
        (4, 1, 1, 1, 1, False),
        (6, 8, 1, 4, 1, False),
        (5, 7, 1, 1, 5, False),
        (6, 4, 1, 2, 1, True),
    ],
)
def test_convolutions_and_their_gradients_match_torch(
    out: int, kernel: int, dilation: int, stride: int, groups: int, replicate: bool
) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    x, weight, bias = draw(2, 24, 5), draw(out, 5 // groups, kernel), draw(out)
    y = conv(x, w.Conv(weight, bias, stride, dilation, groups), replicate=replicate)
    left = (kernel - 1) * dilation - (stride - 1)
    padded = F.pad(x.mT, (left, 0), mode="replicate" if replicate else "constant")
    expected = F.conv1d(padded, weight, bias, stride, dilation=dilation, groups=groups).mT
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-4)
    grad = draw(*y.shape)
    actual_grads = torch.autograd.grad(y, (x, weight, bias), grad)
    expected_grads = torch.autograd.grad(expected, (x, weight, bias), grad)
    torch.testing.assert_close(actual_grads, expected_grads, rtol=0, atol=1e-4)


def test_transposed_convolutions_and_snakes_match_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 24, 5, generator=generator).requires_grad_()
    for kernel, stride in ((2, 2), (8, 4)):
        weight, bias = torch.randn(5, 3, kernel, generator=generator), torch.randn(3)
        y = transposed(x, w.Conv(weight, bias, stride))
        expected = F.conv_transpose1d(x.mT, weight, bias, stride)[..., : 24 * stride].mT
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-4)
    alpha, beta = (torch.randn(5, generator=generator).requires_grad_() for _ in range(2))
    y = snake(x, w.Snake(alpha, beta))
    expected = x + torch.sin(x * alpha.exp()).square() / (beta.exp() + 1e-9)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-4)
    grad = torch.randn(y.shape, generator=generator)
    actual_grads = torch.autograd.grad(y, (x, alpha, beta), grad)
    expected_grads = torch.autograd.grad(expected, (x, alpha, beta), grad)
    torch.testing.assert_close(actual_grads, expected_grads, rtol=0, atol=1e-3)


def test_a_shortened_decoder_gives_the_end_of_the_whole_waveform(tmp_path: Path) -> None:
    torch.manual_seed(0)
    work = Work(tmp_path)
    write_folder(work.voice, *train_tokenizer(["a b c."] * 40), TINY)
    model = codec_model.CodecModel(work.codec_config(), torch.device("cpu"))
    model.calibrate(0.1 * torch.randn(2, 8 * FRAME))
    q, wave = torch.randn(2, 8, TINY.codebook), torch.randn(2, 8 * FRAME)
    whole = model.decoder(q)
    decoded, target = model.decode_part(q, wave, at_start=False)
    torch.testing.assert_close(decoded, whole[:, -2 * FRAME :], rtol=1e-4, atol=1e-5)
    assert torch.equal(target, wave[:, -2 * FRAME :])
    decoded, target = model.decode_part(q, wave, at_start=True)
    torch.testing.assert_close(decoded, whole[:, : 2 * FRAME], rtol=1e-4, atol=1e-5)
    assert torch.equal(target, wave[:, : 2 * FRAME])


def test_quantised_projections_are_sums_of_entries_with_straight_through_gradients() -> None:
    torch.manual_seed(0)
    quantizer = Quantizer(groups=4, codes=8, dim=6, device=torch.device("cpu"))
    semantic, acoustic = (torch.randn(5, 6, requires_grad=True) for _ in range(2))
    quantizer.initialise(torch.randn(20, 6), torch.randn(20, 6))
    books, codes = quantizer.books.clone(), quantizer.encode(semantic, acoustic)
    active = torch.ones(4, 5)
    active[2:, 0] = 0  # the first row uses codebooks 0 and 1
    found = quantizer(semantic, acoustic, active)
    entries = [books[k][codes[:, k]] for k in range(4)]
    used = torch.stack(entries[1:]) * active[1:, :, None]
    torch.testing.assert_close(found.semantic, entries[0])
    torch.testing.assert_close(found.acoustic, used.sum(0))
    for output, projection in ((found.semantic, semantic), (found.acoustic, acoustic)):
        (grad,) = torch.autograd.grad(output.sum(), projection, retain_graph=True)
        assert torch.equal(grad, torch.ones_like(projection))


def test_discriminators_learn_to_tell_waveforms_apart() -> None:
    torch.manual_seed(0)
    time = torch.arange(7680) / 24_000
    real = torch.sin(2 * torch.pi * 220 * time).repeat(2, 1)
    fake = (real + 0.05 * torch.randn_like(real)).requires_grad_()
    discriminators = Discriminators(Spectra(torch.device("cpu")), channels=4)
    optimizer = torch.optim.Adam(discriminators.parameters(), lr=3e-3)
    losses: list[float] = []
    for _ in range(12):
        loss = discriminator_loss(discriminators(real), discriminators(fake.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    output_real, output_fake = discriminators(real), discriminators(fake)
    assert feature_loss(output_real, output_real).item() == 0
    assert feature_loss(output_real, output_fake).item() > 0.01
    (grad,) = torch.autograd.grad(adversarial_loss(output_fake), fake)
    assert grad.isfinite().all() and (grad != 0).any(1).all()


def test_discriminators_do_not_learn_how_silent_a_pause_is() -> None:
    """Recordings begin with digital silence, decoded speech does not."""
    torch.manual_seed(0)
    real, fake = torch.zeros(2, 3840), 2e-4 * torch.randn(2, 3840)
    discriminators = Discriminators(Spectra(torch.device("cpu")), channels=4)
    optimizer = torch.optim.Adam(discriminators.parameters(), lr=3e-3)
    losses: list[float] = []
    for _ in range(40):
        loss = discriminator_loss(discriminators(real), discriminators(fake))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses) > 3.8  # 4.0 if all scores are 0.5; without noise it falls to 2.7


def tone(hertz: float, shift: float = 0.0) -> torch.Tensor:
    """Half a second of a sine [1, samples] with a level of -23 dBFS; shift in periods."""
    seconds = torch.arange(SAMPLE_RATE // 2) / SAMPLE_RATE
    return 0.1 * torch.sin(2 * torch.pi * (hertz * seconds + shift))[None]


def test_the_distance_of_spectra_depends_on_the_phases_of_low_frequencies_only() -> None:
    low, high, spectra = tone(300), tone(3000), Spectra(torch.device("cpu"))
    assert spectra.phase_distance(high - low, low + high) > 3
    assert spectra.phase_distance(low - high, low + high) < 0.1
    assert spectra.magnitude_distance(high - low, low + high) < 0.5
    assert spectra.magnitude_distance(high, low + high) > 1


def test_silence_does_not_have_most_of_the_gradient_of_magnitudes() -> None:
    torch.manual_seed(0)
    speech = 0.1 * torch.randn(1, SAMPLE_RATE // 4)
    recording = torch.cat([torch.zeros_like(speech), speech], 1)
    decoded = torch.cat([4e-5 * torch.randn_like(speech), 0.8 * speech], 1).requires_grad_()
    distance = Spectra(torch.device("cpu")).magnitude_distance(decoded, recording)
    (grad,) = torch.autograd.grad(distance, decoded)
    in_silence, in_speech = grad[:, : speech.shape[1] - 2048], grad[:, speech.shape[1] + 2048 :]
    assert in_silence.norm() < 3 * in_speech.norm()  # 139 times with absolute differences


def test_the_distance_of_phases_does_not_depend_on_the_decoded_level() -> None:
    spectra, wave = Spectra(torch.device("cpu")), tone(120) + tone(360)
    for decibels in (-14, 0, 14):
        gain = 10 ** (decibels / 20)
        assert spectra.phase_distance(gain * wave, wave).abs() < 1e-3
        quarter = spectra.phase_distance(gain * (tone(120, 0.25) + tone(360, 0.25)), wave)
        assert quarter == pytest.approx(2, abs=0.1)  # of two resolutions
    decoded = (0.5 * tone(120, 0.2) + 0.5 * tone(360, 0.1)).requires_grad_()
    (grad,) = torch.autograd.grad(spectra.phase_distance(decoded, wave), decoded)
    along = (grad * decoded).sum().detach()  # the change with the level
    assert along.abs() < 0.02 * grad.norm() * decoded.norm()


def test_the_gradient_of_phases_is_finite_at_silence_and_makes_it_like_the_recording() -> None:
    spectra, wave = Spectra(torch.device("cpu")), tone(120)
    decoded = torch.zeros_like(wave).requires_grad_()
    (grad,) = torch.autograd.grad(spectra.phase_distance(decoded, wave), decoded)
    assert F.cosine_similarity(-grad, wave) > 0.8
    assert grad.abs().max() < 1  # without a floor 280
    silence = torch.zeros_like(wave)
    (grad,) = torch.autograd.grad(spectra.phase_distance(decoded, silence), decoded)
    assert not grad.any()


def test_a_recogniser_learns_phones_and_measures_what_distinguishes_them() -> None:
    """Two phones are tones of 500 Hz and 2 kHz; each half frame has one of them."""
    torch.manual_seed(0)
    recogniser = PhoneRecogniser(Spectra(torch.device("cpu")))
    optimizer = torch.optim.Adam(recogniser.parameters(), lr=3e-3)
    seconds = torch.arange(FRAME // 2) / SAMPLE_RATE
    tones = 0.1 * torch.stack([torch.sin(2 * torch.pi * hz * seconds) for hz in (500, 2000)])
    phones = torch.randint(0, 2, (8, 6, 2))
    wave = tones[phones].flatten(1)
    for _ in range(60):
        optimizer.zero_grad()
        recogniser.loss(wave, phones).backward()
        optimizer.step()
    assert recogniser.loss(wave, phones) < 0.2
    assert recogniser(wave)[0].argmax(-1).equal(phones.flatten(1))
    assert recogniser.distance(wave, wave) == 0
    other = tones[1 - phones].flatten(1)
    assert recogniser.distance(other, wave) > 3 * recogniser.distance(0.7 * wave, wave)
    noise, norms = torch.randn_like(wave), list[torch.Tensor]()
    for level in (1e-5, 1e-4):  # of decoded silence: the gradient vanishes with the difference
        decoded = (level * noise).requires_grad_()
        distance = recogniser.distance(decoded, torch.zeros_like(wave))
        norms.append(torch.autograd.grad(distance, decoded)[0].norm())
    assert norms[0] < 0.3 * norms[1]
    phones[:] = -100  # of crops between frames
    phones[0, 0, 0] = 0
    assert recogniser.loss(wave, phones).isfinite()
