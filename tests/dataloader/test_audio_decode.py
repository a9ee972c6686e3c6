import argparse
import io
import json
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import soxr
from dataset_samples import image_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from sound import chirp, encoded, recording, tone

from dataloader.audio import decode_audio, read_audio_size, resample, resampled_length
from dataloader.format import PLACEHOLDER, DataError, Item, Sample, SampleError, validate_sample
from dataloader.index import Index
from dataloader.reader import Reader
from dataloader.recipes.from_jsonl import build_from_jsonl
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from omni.commands import data

NOISE = np.random.default_rng(0).uniform(-0.9, 0.9, 9000).astype(np.float32)
BOTH = pytest.mark.parametrize("kind", ["wav", "flac"])


@pytest.mark.parametrize(
    ("kind", "subtype", "step"),
    [
        ("wav", "PCM_U8", 2**-7),
        ("wav", "PCM_16", 2**-15),
        ("wav", "PCM_24", 2**-23),
        ("wav", "FLOAT", 0),
        ("wav", "DOUBLE", 0),
        ("flac", "PCM_16", 2**-15),
        ("flac", "PCM_24", 2**-23),
    ],
)
def test_samples_come_back(kind, subtype, step):
    decoded = decode_audio(recording(NOISE, 16000, kind, subtype))
    assert decoded.dtype == np.float32
    assert decoded.shape == (9000,)
    np.testing.assert_allclose(decoded, NOISE, rtol=0, atol=step + 1e-7)


@BOTH
@pytest.mark.parametrize("channels", [2, 3])
def test_channels_are_averaged(kind, channels):
    many = np.random.default_rng(1).uniform(-0.9, 0.9, (500, channels)).astype(np.float32)
    decoded = decode_audio(recording(many, 44100, kind))
    assert decoded.shape == (500,)
    np.testing.assert_allclose(decoded, many.mean(1), atol=2**-15)
    assert np.abs(decoded - many[:, 0]).max() > 0.1


@BOTH
@pytest.mark.parametrize("keep", [0.999, 0.9, 0.5, 0.1, 0.001])
def test_a_truncated_recording_is_a_sample_error(kind, keep):
    item = recording(NOISE, 16000, kind)
    with pytest.raises(SampleError):
        decode_audio(replace(item, data=item.data[: int(keep * len(item.data))]))


def test_corrupt_wrong_size_and_wrong_format():
    item = recording(NOISE, 16000, "flac")
    for size in ((9000, 8000), (8999, 16000), (16000, 9000), (9000,)):
        with pytest.raises(SampleError, match=r"\(9000, 16000\) .*metadata says \("):
            decode_audio(replace(item, size=size))
    with pytest.raises(SampleError, match="is FLAC, its metadata says wav"):
        decode_audio(replace(item, format="wav"))
    middle = len(item.data) // 2
    with pytest.raises(SampleError, match=r"cannot be decoded: .*flac"):
        decode_audio(replace(item, data=item.data[:middle] + b"\0" * 9 + item.data[middle + 9 :]))
    for garbage in (b"", b"RIFF", b"fLaC", b"hello", image_bytes(8, 8)):
        with pytest.raises(SampleError, match=r"not a recording that can be read: [^<]*$"):
            decode_audio(replace(item, data=garbage))
    broken = NOISE.copy()
    broken[17] = np.nan
    with pytest.raises(SampleError, match="no finite numbers"):
        decode_audio(recording(broken, 16000, "wav", "FLOAT"))


@BOTH
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_anywhere_is_a_sample_error_or_samples(kind, data):
    item = recording(NOISE[:2000], 16000, kind)
    # Half of the damage goes to the header, where it may claim anything.
    at = data.draw(st.integers(0, 100) | st.integers(0, len(item.data) - 1))
    damage = data.draw(st.binary(min_size=1, max_size=8))
    damaged = item.data[:at] + damage + item.data[at + len(damage) :]
    try:
        decoded = decode_audio(replace(item, data=damaged))
    except SampleError:
        return
    assert decoded.shape == (2000,)
    assert np.isfinite(decoded).all()


@BOTH
def test_the_header_gives_format_and_size(kind):
    stereo = np.stack([NOISE, -NOISE], 1)
    assert read_audio_size(encoded(NOISE, 22050, kind)) == (kind, (9000, 22050))
    assert read_audio_size(encoded(stereo, 48000, kind)) == (kind, (9000, 48000))


def test_headers_without_a_usable_length():
    with pytest.raises(SampleError, match="is AIFF: convert it to WAV, FLAC, MP3 or Ogg"):
        read_audio_size(encoded(NOISE, 16000, "aiff"))
    with pytest.raises(SampleError, match="not a recording"):
        read_audio_size(b"hello")
    with pytest.raises(SampleError, match="says 0 samples"):
        read_audio_size(encoded(NOISE[:0], 16000, "wav"))
    item = recording(NOISE, 16000, "flac")
    for claim in (b"\xff\xff\xff\xff", b"\0\0\0\0"):  # the lower 32 bits of the number of samples
        damaged = item.data[:22] + claim + item.data[26:]
        with pytest.raises(SampleError, match=r"header says \d+ samples"):
            read_audio_size(damaged)
        with pytest.raises(SampleError):
            decode_audio(replace(item, data=damaged))


LOSSY = [("mp3", "MPEG_LAYER_III"), ("ogg", "VORBIS"), ("ogg", "OPUS")]


@pytest.mark.parametrize(("kind", "subtype"), LOSSY)
@pytest.mark.parametrize("samples", [1, 100, 9000, 40_000])
def test_lossy_recordings_come_back_as_long_as_they_were_and_in_their_place(kind, subtype, samples):
    sound = np.stack([chirp(200, 3000, samples, 16000), tone(440, samples, 16000, 0.1)], 1)
    item = recording(sound, 16000, kind, subtype)
    assert read_audio_size(item.data) == (kind, (samples, 16000))
    decoded, plain = decode_audio(item), sound.mean(1)
    assert decoded.shape == (samples,)
    if samples == 40_000:
        off = [np.std(np.roll(decoded, moved) - plain) / np.std(plain) for moved in (0, 1)]
        assert off[0] < 0.1 < 0.4 < off[1]


@pytest.mark.parametrize(("kind", "subtype"), LOSSY)
@pytest.mark.parametrize("keep", [0.99, 0.9, 0.5, 0.1, 0.001])
def test_a_truncated_lossy_recording_is_a_sample_error(kind, subtype, keep):
    item = recording(chirp(200, 3000, 40_000, 16000), 16000, kind, subtype)
    with pytest.raises(SampleError):
        decode_audio(replace(item, data=item.data[: int(keep * len(item.data))]))


@pytest.mark.parametrize(("kind", "subtype"), LOSSY)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damage_of_a_lossy_recording_is_a_sample_error_or_samples(kind, subtype, data):
    item = recording(NOISE[:2000], 16000, kind, subtype)
    at = data.draw(st.integers(0, 100) | st.integers(0, len(item.data) - 1))
    damage = data.draw(st.binary(min_size=1, max_size=8))
    try:
        decoded = decode_audio(replace(item, data=item.data[:at] + damage + item.data[at + len(damage) :]))
    except SampleError:
        return
    assert decoded.shape == (2000,)


def mp3(rate: int, mode: str) -> tuple[bytes, bytes]:
    """Ten seconds with silence and noise among them, with and without the header that says its length."""
    sound = tone(440, 10 * rate, rate)
    sound[4 * rate : 6 * rate] = np.random.default_rng(0).uniform(-0.9, 0.9, 2 * rate)
    sound[8 * rate :] = 0
    out = io.BytesIO()
    soundfile.write(out, sound, rate, format="MP3", bitrate_mode=mode, compression_level=0.5)
    whole = out.getvalue()
    header = max(whole.find(b"Xing"), whole.find(b"Info"))
    return whole, whole[whole.find(whole[:2], header) :]


@pytest.mark.parametrize("rate", [8000, 11025, 44100])
def test_no_part_of_an_mp3_is_left_out_unsaid(rate):
    """libsndfile guesses the length of one that does not say it, and reads no further."""
    whole, bare = mp3(rate, "VARIABLE")
    assert soundfile.info(io.BytesIO(bare)).frames < 3 * rate
    with pytest.raises(SampleError, match=r"frames hold \d+ samples, and \d+ would be read.*write it anew"):
        read_audio_size(bare)
    for file in (whole, b"ID3\x04\0\0\0\0\x01\x05" + b"\0" * 133 + whole, whole + b"TAG" + b"\0" * 125):
        assert read_audio_size(file) == ("mp3", (10 * rate, rate))
    _, alike = mp3(rate, "CONSTANT")
    kind, size = read_audio_size(alike)
    assert 10 * rate <= size[0] < 10 * rate + 4 * 1152
    assert decode_audio(Item("audio", kind, size, alike)).shape == size[:1]


RATES = st.sampled_from([8000, 11025, 16000, 22050, 24000, 44100, 48000, 96000]) | st.integers(4000, 200_000)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4000), RATES, st.sampled_from([8000, 16000, 24000]))
def test_the_resampled_length_is_known_beforehand(samples, rate, new_rate):
    changed = resample(NOISE[:samples], rate, new_rate)
    assert changed.dtype == np.float32
    assert changed.shape == (resampled_length(samples, rate, new_rate),)
    # Nothing that matters is cut off or added: soxr gives the same number, but for its rounding.
    if rate != new_rate:
        assert abs(len(soxr.resample(NOISE[:samples], rate, new_rate)) - len(changed)) <= 1


def test_the_resampled_length_is_the_nearest():
    # 0.36, 0.73, 1.09, 1.45, 1.81 and 2.18 samples of the new rate
    assert [resampled_length(samples, 44100, 16000) for samples in range(1, 7)] == [1, 1, 1, 1, 2, 2]
    assert [resampled_length(samples, 16000, 8000) for samples in range(1, 7)] == [1, 1, 2, 2, 3, 3]
    assert resampled_length(1, 192_000, 8000) == 1
    assert resampled_length(2**31 - 1, 44100, 16000) == round((2**31 - 1) * 16000 / 44100)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_resampling_keeps_a_tone(rate):
    changed = resample(tone(1000, rate, rate), rate, 16000)
    expected = tone(1000, 16000, 16000)
    assert np.abs(changed - expected)[500:-500].max() < 1e-3


def test_resampling_removes_what_the_new_rate_cannot_hold():
    changed = resample(tone(10_000, 48000, 48000), 48000, 16000)
    assert np.abs(changed[500:-500]).max() < 1e-3


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (Item("audio", "aac", (100, 16000), b"x"), "unknown format 'aac' of modality 'audio'.*flac, mp3"),
        (Item("audio", "wav", (100,), b"x"), r"size \(100,\) must be .*\(samples, sampling rate\)"),
        (Item("audio", "flac", (100, 0), b"x"), "must be positive"),
        (Item("audio", "flac", (100, 16000), b""), "has no bytes"),
    ],
)
def test_a_bad_recording_is_named(item, message):
    with pytest.raises(DataError, match=message):
        validate_sample(Sample("n", PLACEHOLDER, (item,)))


def jsonl(path, *files):
    lines = [
        {"id": f, "text": PLACEHOLDER + "heard", "items": [{"modality": "audio", "path": f}]} for f in files
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_recordings_from_jsonl(tmp_path, capsys):
    files = {
        "a.wav": encoded(chirp(100, 900, 800, 8000), 8000),
        "b.flac": encoded(tone(440, 4410, 44100), 44100, "flac"),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert build_from_jsonl(jsonl(tmp_path / "mine.jsonl", *files), tmp_path / "set", ByteTokenizer())
    index = Index.open(tmp_path / "set", ByteTokenizer())
    assert index.manifest.modalities == ("audio",)
    sizes = [index.meta(i, "s", lambda modality, size: (0, 0)).items[0].size for i in (0, 1)]
    assert sizes == [(800, 8000), (4410, 44100)]
    reader = Reader(tmp_path / "set")
    items = [reader.read(i, text=True, items=True).items[0] for i in (0, 1)]
    assert [(item.format, item.data) for item in items] == [
        ("wav", files["a.wav"]),
        ("flac", files["b.flac"]),
    ]
    assert verify(tmp_path / "set") == 0
    assert "2 samples, 2 items: all good" in capsys.readouterr().out


def test_a_recording_that_cannot_be_read_stops_the_build(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"nothing to hear")
    with pytest.raises(DataError, match=r"mine\.jsonl:1: .*a\.wav: not a recording"):
        build_from_jsonl(jsonl(tmp_path / "mine.jsonl", "a.wav"), tmp_path / "set", ByteTokenizer())
    assert not (tmp_path / "set").exists()


def test_verify_decodes_recordings(tmp_path, capsys):
    whole = recording(NOISE, 16000, "flac")
    with DatasetWriter(tmp_path / "set", ByteTokenizer()) as writer:
        writer.add(Sample("whole", PLACEHOLDER, (whole,)))
        writer.add(Sample("cut", PLACEHOLDER, (replace(whole, data=whole.data[:9000]),)))
    assert verify(tmp_path / "set") == 1
    out = capsys.readouterr().out
    assert "1 undecodable" in out
    assert "sample 'cut' (1), item 0: the recording cannot be decoded" in out


def verify(path):
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    return data.run(parser.parse_args(["verify", str(path)]))


@pytest.mark.parametrize("order", ["LITTLE", "BIG"])
def test_a_wav_that_is_cut_short_is_no_shorter_recording(tmp_path, order):
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(1000, np.float32), 8000, format="WAV", subtype="PCM_16", endian=order)
    whole = buffer.getvalue()
    assert read_audio_size(whole) == ("wav", (1000, 8000))
    cut = whole[:700]
    with pytest.raises(SampleError, match=r"cut short: its header says 2000 bytes of samples, it holds 6"):
        read_audio_size(cut)
    with pytest.raises(SampleError, match="cut short"):
        decode_audio(Item("audio", "wav", (328, 8000), cut))
    unknown = whole[:40] + b"\xff" * 4 + whole[44:]  # as a program writes it into a pipe
    assert read_audio_size(unknown) == ("wav", (1000, 8000))
