import io
import re
import subprocess
import sys
import zlib
from dataclasses import replace

import numpy as np
import pytest
import simplejpeg
from dataset_samples import image_item
from PIL import Image, ImageOps

from dataloader import decode
from dataloader.decode import decode_image, read_image_size
from dataloader.format import Item, SampleError
from dataloader.image_header import read_jpeg_frame


def pillow_item(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return Item("image", kind.lower(), (image.height, image.width), buffer.getvalue())


@pytest.mark.parametrize("gray", [True, False])
def test_png_is_exact(gray):
    shape = (12, 20) if gray else (12, 20, 3)
    pixels = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    decoded = decode_image(pillow_item(Image.fromarray(pixels), "PNG"))
    assert decoded.shape == (12, 20, 1 if gray else 3)
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, pixels.reshape(decoded.shape))


def test_webp_is_exact_where_it_is_lossless_and_close_where_it_is_not():
    pixels = np.random.default_rng(1).integers(0, 256, (12, 20, 3), dtype=np.uint8)
    item = pillow_item(Image.fromarray(pixels), "WEBP", lossless=True)
    assert read_image_size(item.data) == ("webp", (12, 20))
    np.testing.assert_array_equal(decode_image(item), pixels)
    ramp = np.linspace(0, 255, 24 * 40).reshape(24, 40).astype(np.uint8)
    lossy = decode_image(pillow_item(Image.fromarray(np.stack([ramp] * 3, -1)), "WEBP", quality=90))
    assert np.abs(lossy.astype(int) - ramp[..., None]).max() < 8


def test_of_an_animated_webp_it_is_the_first_picture():
    first, second = (Image.new("RGB", (8, 6), colour) for colour in ((200, 10, 10), (10, 10, 200)))
    item = pillow_item(first, "WEBP", save_all=True, append_images=[second], lossless=True)
    assert (decode_image(item) == (200, 10, 10)).all()


@pytest.mark.parametrize("gray", [True, False])
def test_jpeg_by_simplejpeg_and_by_pillow(gray, monkeypatch):
    ramp = np.linspace(0, 255, 24 * 40).reshape(24, 40).astype(np.uint8)
    item = pillow_item(Image.fromarray(ramp if gray else np.stack([ramp, ramp[::-1], ramp], -1)), "JPEG")
    fast = decode_image(item)
    monkeypatch.setattr(decode, "simplejpeg", None)
    slow = decode_image(item)
    assert fast.shape == slow.shape == (24, 40, 1 if gray else 3)
    assert np.abs(fast.astype(int) - slow.astype(int)).max() <= 4
    assert np.abs(fast[..., 0].astype(int) - ramp).max() < 40


@pytest.mark.parametrize(
    "mode, channels", [("1", 1), ("L", 1), ("LA", 1), ("P", 3), ("RGB", 3), ("RGBA", 3), ("I;16", 1)]
)
def test_png_modes(mode, channels):
    image = Image.new(mode, (6, 4))
    assert decode_image(pillow_item(image, "PNG")).shape == (4, 6, channels)


def test_16_bit_gray_keeps_its_upper_bits():
    image = Image.fromarray(np.full((4, 4), 0xAB12, dtype=np.uint16))
    assert (decode_image(pillow_item(image, "PNG")) == 0xAB).all()


# What EXIF calls each orientation: where the first stored row and the first stored column are shown.
SHOWN = {
    1: ("top", "left"),
    2: ("top", "right"),
    3: ("bottom", "right"),
    4: ("bottom", "left"),
    5: ("left", "top"),
    6: ("right", "top"),
    7: ("right", "bottom"),
    8: ("left", "bottom"),
}


def turned_item(orientation, kind, pixels):
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    image = Image.fromarray(pixels)
    image.save(buffer, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {}))
    size = ImageOps.exif_transpose(Image.open(buffer)).size[::-1]
    return Item("image", kind.lower(), size, buffer.getvalue())


@pytest.mark.parametrize("orientation", SHOWN)
@pytest.mark.parametrize("decoder", ["simplejpeg", "pillow, jpeg", "png", "webp"])
def test_pictures_stand_as_their_orientation_says(orientation, decoder, monkeypatch):
    pixels = np.zeros((16, 40, 3), np.uint8)
    pixels[:8] += np.uint8([160, 0, 0])  # the first stored rows are red
    pixels[:, :8] += np.uint8([0, 0, 160])  # the first stored columns are blue
    if decoder.startswith("pillow"):
        monkeypatch.setattr(decode, "simplejpeg", None)
    item = turned_item(orientation, decoder.upper() if decoder in ("png", "webp") else "JPEG", pixels)
    decoded = decode_image(item).astype(int)
    edges = {"top": decoded[:4], "bottom": decoded[-4:], "left": decoded[:, :4], "right": decoded[:, -4:]}
    for channel, edge in zip((0, 2), SHOWN[orientation], strict=True):
        others = [name for name in edges if name != edge]
        assert edges[edge][..., channel].min() > 100, (edge, channel)
        assert all(edges[name][..., channel].min() < 60 for name in others)
    assert decoded.shape[:2] == ((40, 16) if orientation > 4 else (16, 40))
    assert read_image_size(item.data) == (item.format, item.size)
    shown = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(item.data)))).astype(int)
    assert np.abs(decoded - shown).max() <= (0 if decoder == "png" else 24)


@pytest.mark.parametrize("exif", [b"Exif\0\0damaged", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0"])
def test_metadata_that_cannot_be_read_turn_nothing(exif):
    buffer = io.BytesIO()
    Image.new("L", (20, 10)).save(buffer, "JPEG", exif=exif)
    assert read_image_size(buffer.getvalue()) == ("jpeg", (10, 20))
    assert decode_image(Item("image", "jpeg", (10, 20), buffer.getvalue())).shape == (10, 20, 1)


def test_a_size_that_was_stated_before_turning_is_refused_with_the_remedy():
    item = turned_item(6, "JPEG", np.zeros((16, 40, 3), np.uint8))
    with pytest.raises(SampleError, match=r"\(40, 16\).*metadata says \(16, 40\).*EXIF orientation"):
        decode_image(replace(item, size=(16, 40)))


def glyph(mode, colour):
    """A picture of one colour whose shape is in its alpha channel: the left half is opaque."""
    image = Image.new(mode, (8, 4), colour)
    alpha = Image.new("L", (8, 4))
    alpha.paste(255, (0, 0, 4, 4))
    image.putalpha(alpha)
    return image


@pytest.mark.parametrize(
    "mode, colour, left, right",
    [
        ("RGB", (0, 0, 0), 0, 255),
        ("RGB", (255, 255, 255), 255, 0),
        ("RGB", (250, 250, 250), 250, 0),
        ("RGB", (90, 90, 90), 90, 255),
        ("L", 0, 0, 255),
        ("L", 255, 255, 0),
    ],
)
def test_a_picture_in_its_alpha_channel_is_seen(mode, colour, left, right):
    decoded = decode_image(pillow_item(glyph(mode, colour), "PNG"))
    assert decoded.shape == (4, 8, 1 if mode == "L" else 3)
    assert (decoded[:, :4] == left).all()
    assert (decoded[:, 4:] == right).all()


def test_an_opaque_alpha_channel_changes_nothing():
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    for values in (pixels, np.full_like(pixels, 255)):
        image = Image.fromarray(values)
        image.putalpha(255)
        np.testing.assert_array_equal(decode_image(pillow_item(image, "PNG")), values)


def test_half_transparent_pixels_are_mixed_with_white():
    image = Image.new("RGBA", (4, 4), (0, 100, 200, 51))
    assert decode_image(pillow_item(image, "PNG"))[0, 0].tolist() == [204, 224, 244]


def test_a_transparent_colour_of_a_palette_is_white():
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.putpixel((0, 0), 0)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", transparency=0)
    decoded = decode_image(Item("image", "png", (4, 4), buffer.getvalue()))
    assert decoded[0, 0].tolist() == [255, 255, 255]
    assert decoded[1, 1].tolist() == [10, 20, 30]


@pytest.mark.parametrize("colour, shown", [((0, 255, 255, 0), (255, 0, 0)), ((0, 0, 0, 255), (0, 0, 0))])
def test_cmyk_is_shown_in_its_colours(colour, shown):
    decoded = decode_image(pillow_item(Image.new("CMYK", (16, 8), colour), "JPEG"))
    assert decoded.shape == (8, 16, 3)
    assert np.abs(decoded.astype(int) - shown).max() < 8


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("keep", [0.9, 0.5, 0.1])
def test_a_truncated_image_is_a_sample_error(kind, keep):
    item = image_item(64, 64, kind, gray=False)
    with pytest.raises(SampleError):
        decode_image(replace(item, data=item.data[: int(keep * len(item.data))]))


def test_corrupt_wrong_size_and_wrong_format():
    item = image_item(16, 24)
    with pytest.raises(SampleError, match=r"\(16, 24\).*metadata says \(24, 16\)"):
        decode_image(replace(item, size=(24, 16)))
    with pytest.raises(SampleError, match="not an image"):
        decode_image(replace(item, data=b"\x89PNG garbage"))
    with pytest.raises(SampleError, match="is PNG, its metadata says jpeg"):
        decode_image(replace(item, format="jpeg"))
    middle = len(item.data) // 2
    with pytest.raises(SampleError):
        decode_image(replace(item, data=item.data[:middle] + b"\0" * 9 + item.data[middle + 9 :]))


def jpeg_header(height, width, sof=0xC0):
    """A grey JPEG of 8x8 pixels whose header says another size."""
    buffer = io.BytesIO()
    Image.new("L", (8, 8)).save(buffer, "JPEG")
    data = bytearray(buffer.getvalue())
    at = data.index(b"\xff\xc0")
    data[at + 1] = sof
    data[at + 5 : at + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(data)


def png_header(height, width):
    data = bytearray(image_item(8, 8).data)
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def webp_header(height, width):
    data = bytearray(pillow_item(Image.new("RGB", (8, 8)), "WEBP", lossless=True).data)
    flags = int.from_bytes(data[21:25], "little") & ~0xFFFFFFF
    data[21:25] = (flags | height - 1 << 14 | width - 1).to_bytes(4, "little")
    return bytes(data)


@pytest.mark.parametrize("stated", [(64, 64), (12_000, 12_000)])
@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_a_header_of_more_than_its_bytes_can_hold_is_refused_before_anything_is_decoded(
    kind, stated, monkeypatch
):
    data = (jpeg_header if kind == "jpeg" else png_header)(12_000, 12_000)
    assert len(data) < 700

    def decoded(*given, **named):
        raise AssertionError("decoded")

    monkeypatch.setattr(decode, "_decode_jpeg", decoded)
    monkeypatch.setattr(decode, "_decode_pillow", decoded)
    why = r"12000x12000 pixels, which take \d+ bytes at least" if stated[0] > 64 else r"says \(64, 64\)"
    with pytest.raises(SampleError, match=why):
        decode_image(Item("image", kind, stated, data))


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_a_header_unlike_the_metadata_costs_no_memory(kind):
    data = {"jpeg": jpeg_header, "png": png_header, "webp": webp_header}[kind](12_000, 12_000)
    code = (
        "import resource, sys; from dataloader.decode import decode_image\n"
        "from dataloader.format import Item, SampleError\n"
        "kind, data = sys.argv[1], sys.stdin.buffer.read()\n"
        "for size in ((64, 64), (64, 65)):\n"
        "    before, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, False\n"
        "    try: decode_image(Item('image', kind, size, data))\n"
        "    except SampleError: refused = True\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, int(refused))"
    )
    done = subprocess.run([sys.executable, "-c", code, kind], input=data, capture_output=True, check=True)
    kilobytes, refused = map(int, done.stdout.split())
    assert len(data) < 700
    assert kilobytes < 50_000
    assert refused


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"optimize": True}])
def test_pictures_of_one_colour_are_larger_than_the_least_that_is_asked_of_them(options):
    buffer = io.BytesIO()
    Image.new("L", (4000, 3000)).save(buffer, "JPEG", quality=1, **options)
    assert decode_image(Item("image", "jpeg", (3000, 4000), buffer.getvalue())).shape == (3000, 4000, 1)
    buffer = io.BytesIO()
    Image.new("1", (4000, 3000)).save(buffer, "PNG", compress_level=9)
    assert decode_image(Item("image", "png", (3000, 4000), buffer.getvalue())).shape == (3000, 4000, 1)


def test_an_empty_file_says_so():
    with pytest.raises(SampleError, match="the image has no bytes"):
        decode_image(Item("image", "jpeg", (8, 8), b""))
    with pytest.raises(SampleError, match="the image has no bytes"):
        read_image_size(b"")


def test_16_bit_colours_keep_their_upper_bits():
    rows = b"".join(b"\0" + b"\xab\x12\x34\x56\x00\xff" * 4 for _ in range(4))
    header = (4).to_bytes(4, "big") * 2 + bytes([16, 2, 0, 0, 0])
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        len(of).to_bytes(4, "big") + name + of + zlib.crc32(name + of).to_bytes(4, "big")
        for name, of in chunks
    )
    decoded = decode_image(Item("image", "png", (4, 4), data))
    assert decoded.reshape(-1, 3).tolist() == [[0xAB, 0x34, 0x00]] * 16


def test_of_an_animation_the_first_picture_is_shown():
    frames = [Image.new("RGB", (6, 4), colour) for colour in ((200, 0, 0), (0, 200, 0))]
    buffer = io.BytesIO()
    frames[0].save(buffer, "PNG", save_all=True, append_images=frames[1:])
    assert Image.open(buffer).n_frames == 2
    decoded = decode_image(Item("image", "png", (4, 6), buffer.getvalue()))
    assert (decoded == (200, 0, 0)).all()


@pytest.mark.parametrize("extra", [{}, {"icc_profile": b"p" * 200}, {"comment": b"hello"}])
def test_a_bare_header_is_read_as_pillow_reads_it(extra):
    data = noisy_jpeg(**extra)
    frame = read_jpeg_frame(data)
    assert frame == ((48, 64), 3, True, True)
    exif = Image.Exif()
    exif[0x0112] = 6
    for other in ({"exif": exif}, {"xmp": b'<x tiff:Orientation="6"/>'}):
        assert not read_jpeg_frame(noisy_jpeg(**extra, **other)).bare
    start = data.index(b"\xff\xda")
    for cut in range(start):
        assert read_jpeg_frame(data[:cut]) is None


def test_read_image_size():
    assert read_image_size(image_item(16, 24).data) == ("png", (16, 24))
    assert read_image_size(image_item(16, 24, "JPEG", gray=False).data) == ("jpeg", (16, 24))
    with pytest.raises(SampleError, match="GIF: convert it"):
        read_image_size(pillow_item(Image.new("L", (2, 2)), "GIF").data)
    with pytest.raises(SampleError, match="not an image"):
        read_image_size(b"hello")


def noisy_jpeg(**options):
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", quality=80, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("progressive", [False, True])
def test_damage_that_libjpeg_names_is_named_though_pillow_would_show_it(progressive):
    whole = noisy_jpeg(progressive=progressive)
    assert decode_image(Item("image", "jpeg", (48, 64), whole)).shape == (48, 64, 3)
    shown = 0
    for at in range(620, len(whole) - 20, 97):
        data = whole[:at] + b"\xff\xd9" + whole[at + 2 :]  # an end where there is none
        try:
            simplejpeg.decode_jpeg(data)
            continue
        except ValueError as error:
            said = str(error)
        try:
            Image.open(io.BytesIO(data)).load()
            shown += 1
        except (OSError, SyntaxError):
            pass
        with pytest.raises(SampleError, match=re.escape(said)):
            decode_image(Item("image", "jpeg", (48, 64), data))
    assert shown


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_sizes_are_compared_before_anything_is_decoded(kind, monkeypatch):
    item = image_item(16, 24, kind)

    def decoded(*given, **named):
        raise AssertionError("decoded")

    monkeypatch.setattr(decode, "_decode_jpeg", decoded)
    monkeypatch.setattr(decode, "_decode_pillow", decoded)
    with pytest.raises(SampleError, match=r"\(16, 24\).*metadata says \(16, 25\)"):
        decode_image(replace(item, size=(16, 25)))


def test_pictures_that_libjpegs_plain_interface_does_not_know_are_shown():
    buffer = io.BytesIO()
    Image.new("CMYK", (16, 8), (0, 255, 255, 0)).save(buffer, "JPEG")
    assert decode_image(Item("image", "jpeg", (8, 16), buffer.getvalue())).shape == (8, 16, 3)
    rare = bytearray(noisy_jpeg(subsampling=0))
    at = rare.index(b"\xff\xc0")
    rare[at + 11] = 0x31  # luminance three times as wide as colours, in a header alone
    with pytest.raises(ValueError, match="subsampling"):
        simplejpeg.decode_jpeg_header(bytes(rare))
    assert decode._decode_jpeg(bytes(rare)) is None


def test_no_message_names_a_buffer_and_no_warning_shows_through():
    with pytest.raises(SampleError, match=r"it begins with b'nothing'$"):
        read_image_size(b"nothing")
    code = (
        "import io; from PIL import Image; from dataloader.decode import read_image_size; "
        "out = io.BytesIO(); Image.new('1', (24, 16)).save(out, 'PNG'); Image.MAX_IMAGE_PIXELS = 300; "
        "print(read_image_size(out.getvalue()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("('png', (16, 24))\n", "")
