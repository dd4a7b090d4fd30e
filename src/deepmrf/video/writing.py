"""A video file, written frame by frame with exact times, and with the sound of another file copied beside it.

The encoder is what PyAV's build offers: H.264 (x264 or OpenH264), else MPEG-4 part 2; VP9 or VP8 for .webm. Pixels are
yuv420p in BT.709, which every player shows; colour is halved along both axes there, so odd sizes get one more row or
column, a copy of the last. Each frame is written with its own time. MP4 files are written in fragments and turned into
plain ones when they are closed: even a process that is killed leaves a readable file. One that has a note ends with a
seal, in a part of the file that players pass over, if it is whole.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from deepmrf.data.files import Bytes
from deepmrf.video.reading import gist, import_av

H264 = ("libx264", "libopenh264", "mpeg4")
ENCODERS = {
    **dict.fromkeys((".mp4", ".m4v", ".mov", ".mkv"), H264),
    ".webm": ("libvpx-vp9", "libvpx"),
}
"""What a file of each kind is encoded with: the first that PyAV's build has."""
OPTIONS = {
    "libx264": {"crf": "20", "preset": "veryfast", "rc-lookahead": "8"},
    "libopenh264": {"b": "6M"},
    "mpeg4": {"b": "8M"},
    "libvpx-vp9": {"crf": "30", "b": "0", "deadline": "realtime", "cpu-used": "6", "lag-in-frames": "0"},
    "libvpx": {"crf": "10", "b": "6M", "deadline": "realtime", "lag-in-frames": "0"},
}
"""Good quality at a speed that does not hold up the network."""
COARSE = Fraction(1, 30000)
"""MPEG-4's own clock has at most 65,535 ticks a second: finer times are rounded to this."""
KEY_SECONDS = 2
"""Between frames that can be jumped to."""
BT709, LIMITED = 1, 1
"""FFmpeg's numbers for the colours of HD video, and for luma of 16 to 235."""
HYBRID = (61, 7)
"""The libavformat from which fragments become a plain file on closing."""


def encoder_for(path: Path) -> str:
    """The encoder for a file of that name; a sentence where there is none."""
    av = import_av()
    suffix = path.suffix.lower()
    if suffix not in ENCODERS:
        known = ", ".join(ENCODERS)
        raise ValueError(f"{path} would be a {suffix or 'nameless'} file, which cannot keep times: choose {known}.")
    for name in ENCODERS[suffix]:
        with contextlib.suppress(av.codec.codec.UnknownCodecError):
            av.codec.Codec(name, "w")
            return name
    raise ValueError(f"This PyAV was built without {', '.join(ENCODERS[suffix])}: pip install av brings them.")


class Writer:
    """A video file being written: write(image, time), then close.

    size: (height, width) of the frames. rate: frames a second, roughly. time_base: what times are multiples of.
    sound: a file whose sound is copied, packet by packet; `silent` says why if it could not be. aspect: of a pixel.
    note: kept in the file as its comment; such a file is sealed if it is closed as whole (`is_sealed`).
    """

    def __init__(
        self,
        path: Path,
        size: tuple[int, int],
        *,
        rate: Fraction = Fraction(25),
        time_base: Fraction = Fraction(1, 90000),
        sound: Path | None = None,
        aspect: Fraction | None = None,
        note: str = "",
    ) -> None:
        self._av = import_av()
        self.path, self.size, self.encoder = path, size, encoder_for(path)
        self.rate, self.aspect, self.note = rate, aspect, note
        self.time_base = time_base if self.encoder != "mpeg4" or time_base.denominator <= 65535 else COARSE
        self.frames, self.silent = 0, ""
        self._last: int | None = None
        self._shift = Fraction(0)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._open(sound)
        except (self._av.FFmpegError, ValueError) as why:
            if sound is None:
                raise
            self._open(None)
            self.silent = f"its sound does not fit into a {path.suffix} file ({gist(why)})"

    def _open(self, sound: Path | None) -> None:
        options = {"flush_packets": "1"}
        if self.path.suffix.lower() in _MOV:
            options["movie_timescale"] = str(self._ticks(sound))  # else a late start is rounded to milliseconds
            if self._av.library_versions["libavformat"][:2] >= HYBRID:
                options["movflags"] = "hybrid_fragmented+delay_moov+frag_keyframe"
        self._container = self._av.open(str(self.path), "w", options=options)
        self._sound: Sound | None = None
        try:
            if self.note:
                self._container.metadata["comment"] = self.note
            self._stream = self._container.add_stream(self.encoder, rate=self.rate, options=OPTIONS[self.encoder])
            self._set_up(self._stream)
            if sound is not None:
                self._sound = Sound(sound, self._container)
                self.silent = self._sound.silent
            self._container.start_encoding()
        except BaseException:
            self._abandon()
            raise

    def _ticks(self, sound: Path | None) -> int:
        """A second's ticks in which both the frames and the sound can begin exactly."""
        bases = [self.time_base]
        if sound is not None:
            with self._av.open(str(sound), metadata_errors="replace") as file:
                bases += [Fraction(stream.time_base) for stream in file.streams.audio if stream.time_base]
        ticks = math.lcm(*[base.denominator for base in bases])
        return ticks if ticks < 2**31 else bases[0].denominator

    def _set_up(self, stream: Any) -> None:
        height, width = self.size
        stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"
        stream.time_base = stream.codec_context.time_base = self.time_base
        context = stream.codec_context
        context.max_b_frames = 0  # frames are then stored in their order, whatever their times
        context.gop_size = max(1, round(KEY_SECONDS * self.rate))
        context.thread_type = "AUTO"
        context.colorspace = context.color_primaries = context.color_trc = BT709
        context.color_range = LIMITED
        if self.aspect is not None:
            context.sample_aspect_ratio = self.aspect

    def write(self, image: Bytes, time: Fraction) -> None:
        """Add a frame (H, W, 3) at a time in seconds, later than the one before."""
        height, width = self.size
        if image.shape != (height, width, 3):
            raise ValueError(f"A frame has shape {image.shape}, but the video {(height, width, 3)}: resize it.")
        if not self.frames and time < 0:
            self._shift = -time  # no player shows what is before 0
        image = np.pad(image, ((0, height % 2), (0, width % 2), (0, 0)), "edge") if height % 2 or width % 2 else image
        frame = self._av.VideoFrame.from_ndarray(image, format="rgb24")
        frame = frame.reformat(format="yuv420p", dst_colorspace="ITU709", dst_color_range="MPEG")
        place = round((time + self._shift) / self.time_base)
        place = place if self._last is None else max(place, self._last + 1)
        frame.pts, frame.time_base, self._last = place, self.time_base, place
        if self._sound is not None:
            self._sound.copy(place * self.time_base, self._shift)
        self._container.mux(self._stream.encode(frame))
        self.frames += 1

    def close(self, whole: bool = True) -> None:
        """Finish the file. whole: take the rest of the sound, too; else it ends with the last frame."""
        try:
            if self.frames:
                self._container.mux(self._stream.encode(None))
            if self._sound is not None:
                end = (self._last or 0) * self.time_base + 1 / self.rate
                self._sound.copy(None if whole else end, self._shift)
        finally:
            if self._sound is not None:
                self._sound.close()
            self._container.close()
        if whole and self.note and self.frames:
            _seal(self.path)

    def _abandon(self) -> None:
        """Let go of a file that could not be begun."""
        if self._sound is not None:
            self._sound.close()
        with contextlib.suppress(self._av.FFmpegError, ValueError, OSError):
            self._container.close()


_MOV = (".mp4", ".m4v", ".mov")
_SEAL = b"deepmrf: whole"
_SEGMENT = b"\x18\x53\x80\x67\x01"
"""Matroska: the part that holds all others, of a size that is written in seven bytes."""


def is_sealed(path: Path) -> bool:
    """Was this file closed as a whole one? Comments are written at the beginning and could not tell."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - len(_SEAL)))
        return file.read() == _SEAL


def _seal(path: Path) -> None:
    """End a file with an empty box (MP4) or a void element (Matroska) that holds the seal."""
    with path.open("r+b") as file:
        if path.suffix.lower() in _MOV:
            file.seek(0, 2)
            file.write((8 + len(_SEAL)).to_bytes(4, "big") + b"free" + _SEAL)
            return
        place = file.read(1024).find(_SEGMENT) + len(_SEGMENT)
        file.seek(place)
        size, end = int.from_bytes(file.read(7), "big"), file.seek(0, 2)
        void = b"\xec" + bytes([0x80 + len(_SEAL)]) + _SEAL
        file.write(void)
        if place + 7 + size == end:
            file.seek(place)
            file.write((size + len(void)).to_bytes(7, "big"))


class Sound:
    """The sound of a file, copied into a container that is being written, as it is and with its times."""

    def __init__(self, path: Path, output: Any) -> None:
        self._av = import_av()
        self._input, self._output = self._av.open(str(path), metadata_errors="replace"), output
        self._tracks: dict[int, Any] = {}
        self._filters: dict[int, Any] = {}
        self.silent = ""
        known = output.supported_codecs
        for stream in self._input.streams.audio:
            name = stream.codec_context.name if stream.codec_context is not None else "an unknown codec"
            if name not in known:
                self.silent = f"its sound ({name}) does not fit into a {output.format.name} file"
                continue
            copied = output.add_stream_from_template(stream)
            copied.metadata.update(stream.metadata)
            self._tracks[stream.index] = copied
            if name == "aac" and not stream.codec_context.extradata:  # as broadcast: each packet with a header
                filters = importlib.import_module("av.bitstream")
                self._filters[stream.index] = filters.BitStreamFilterContext("aac_adtstoasc", stream)
        tracks = [self._input.streams[index] for index in self._tracks]
        self._packets = self._input.demux(tracks) if tracks else iter(())
        self._next: Any = None
        self._last: dict[int, int] = {}

    def copy(self, until: Fraction | None, shift: Fraction) -> None:
        """Copy what comes before a time in seconds, or all that is left; `shift` is added to its times."""
        while (packet := self._next or self._read()) is not None:
            self._next = packet
            if until is not None and packet.dts * packet.time_base + shift > until:
                return
            self._next, number = None, packet.stream.index
            late = round(shift / packet.time_base)
            packet.dts += late
            packet.pts = packet.dts if packet.pts is None else packet.pts + late
            if packet.dts <= self._last.get(number, packet.dts - 1):
                continue  # times that step back: muxers refuse them
            self._last[number] = packet.dts
            for one in self._filters[number].filter(packet) if number in self._filters else [packet]:
                one.stream = self._tracks[number]
                self._output.mux(one)

    def _read(self) -> Any:
        """The next packet with a time; None at the end, or where the file breaks off."""
        with contextlib.suppress(self._av.FFmpegError):
            for packet in self._packets:
                if packet.dts is not None and packet.size:
                    return packet
        return None

    def close(self) -> None:
        """Let go of the file."""
        self._input.close()
