"""Write a video file frame by frame with exact times, and copy the sound of another file into it.

The encoder depends on PyAV's build: H.264 (x264 or OpenH264), else MPEG-4 part 2; VP9 or VP8 for .webm. Pixels are
yuv420p in BT.709, which every player shows. Its colours have half the resolution, so odd sizes get one more row or
column, a copy of the last. MP4 files are written in fragments and become plain files when they are closed: a process
that is killed leaves a readable file. The same frames give the same file: Matroska gets no random numbers.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from deepmrf.data.files import Bytes, one_line
from deepmrf.video.reading import import_av

H264 = ("libx264", "libopenh264", "mpeg4")
ENCODERS = {
    **dict.fromkeys((".mp4", ".m4v", ".mov", ".mkv"), H264),
    ".webm": ("libvpx-vp9", "libvpx"),
}
"""Encoders for each suffix: the first that PyAV's build has is used."""
OPTIONS = {
    "libx264": {"crf": "20", "preset": "veryfast", "rc-lookahead": "8"},
    "libopenh264": {"b": "6M"},
    "mpeg4": {"b": "8M"},
    "libvpx-vp9": {"crf": "30", "b": "0", "deadline": "realtime", "cpu-used": "6", "lag-in-frames": "0"},
    "libvpx": {"crf": "10", "b": "6M", "deadline": "realtime", "lag-in-frames": "0"},
}
"""Options of each encoder: good quality, and faster than the network."""
MPEG4_MAX_TICKS = 65535
"""MPEG-4 part 2 counts at most this many ticks per second."""
MPEG4_TIME_BASE = Fraction(1, 30000)
"""Finer times, in seconds, are rounded to this for MPEG-4 part 2."""
SECONDS_BETWEEN_KEY_FRAMES = 2
BT709, LIMITED_RANGE = 1, 1
"""FFmpeg's numbers for the colours of HD video, and for luma of 16 to 235."""
HYBRID_SINCE = (61, 7)
"""Version of libavformat from which on fragments become a plain file on closing."""
FRAGMENT_MILLISECONDS = 500
"""Length of a fragment, or of a cluster of Matroska: a process that is killed loses no more."""
MP4_SUFFIXES = (".mp4", ".m4v", ".mov")


def encoder_for(path: Path) -> str:
    """Return the name of the encoder for a file; raises a ValueError if its suffix has none."""
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
    """Writes a video file: write(image, time) for each frame, then close().

    size: (height, width) of the frames. rate: frames per second, approximately. time_base: times are its multiples.
    sound: a file whose sound is copied packet by packet; `silent` says why it could not be. aspect: width / height of a
    pixel. note: the file's comment.
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
        coarse = self.encoder == "mpeg4" and time_base.denominator > MPEG4_MAX_TICKS
        self.time_base = MPEG4_TIME_BASE if coarse else time_base
        self.frames, self.silent = 0, ""
        self._last_tick: int | None = None
        self._shift = Fraction(0)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._open(sound)
        except (self._av.FFmpegError, ValueError) as error:
            if sound is None:
                raise
            self._open(None)
            self.silent = f"its sound does not fit into a {path.suffix} file ({one_line(error)})"

    def _open(self, sound: Path | None) -> None:
        options = {"flush_packets": "1"}
        if self.path.suffix.lower() in MP4_SUFFIXES:
            options["movie_timescale"] = str(self._ticks(sound))  # the default rounds a late start to milliseconds
            if self._av.library_versions["libavformat"][:2] >= HYBRID_SINCE:
                options["movflags"] = "hybrid_fragmented+delay_moov+frag_keyframe"
                options["frag_duration"] = str(1000 * FRAGMENT_MILLISECONDS)
        else:
            options |= {"fflags": "bitexact", "cluster_time_limit": str(FRAGMENT_MILLISECONDS)}
        self._container = self._av.open(str(self.path), "w", options=options)
        self._sound: Sound | None = None
        try:
            if self.note:
                self._container.metadata["comment"] = self.note
            self._stream = self._container.add_stream(self.encoder, rate=self.rate, options=OPTIONS[self.encoder])
            self._configure(self._stream)
            if sound is not None:
                self._sound = Sound(sound, self._container)
                self.silent = self._sound.silent
            self._container.start_encoding()
        except BaseException:
            with contextlib.suppress(self._av.FFmpegError, ValueError, OSError):
                self._close()
            raise

    def _ticks(self, sound: Path | None) -> int:
        """Ticks per second in which both the frames and the sound can begin exactly."""
        time_bases = [self.time_base]
        if sound is not None:
            with self._av.open(str(sound), metadata_errors="replace") as file:
                time_bases += [Fraction(stream.time_base) for stream in file.streams.audio if stream.time_base]
        ticks = math.lcm(*[time_base.denominator for time_base in time_bases])
        return ticks if ticks < 2**31 else self.time_base.denominator

    def _configure(self, stream: Any) -> None:
        height, width = self.size
        stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"
        stream.time_base = stream.codec_context.time_base = self.time_base
        context = stream.codec_context
        context.max_b_frames = 0  # so that frames are stored in their order
        context.gop_size = max(1, round(SECONDS_BETWEEN_KEY_FRAMES * self.rate))
        context.thread_type = "AUTO"
        context.colorspace = context.color_primaries = context.color_trc = BT709
        context.color_range = LIMITED_RANGE
        if self.aspect is not None:
            context.sample_aspect_ratio = self.aspect

    def write(self, image: Bytes, time: Fraction) -> None:
        """Add a frame (H, W, 3) at a time in seconds, later than the last one."""
        height, width = self.size
        if image.shape != (height, width, 3):
            raise ValueError(f"A frame has shape {image.shape}, but the video {(height, width, 3)}: resize it.")
        if not self.frames and time < 0:
            self._shift = -time  # players show nothing before 0
        image = np.pad(image, ((0, height % 2), (0, width % 2), (0, 0)), "edge") if height % 2 or width % 2 else image
        frame = self._av.VideoFrame.from_ndarray(image, format="rgb24")
        frame = frame.reformat(format="yuv420p", dst_colorspace="ITU709", dst_color_range="MPEG")
        tick = round((time + self._shift) / self.time_base)
        tick = tick if self._last_tick is None else max(tick, self._last_tick + 1)
        frame.pts, frame.time_base, self._last_tick = tick, self.time_base, tick
        if self._sound is not None:
            self._sound.copy(tick * self.time_base, self._shift)
        self._container.mux(self._stream.encode(frame))
        self.frames += 1

    def close(self, all_sound: bool = True) -> None:
        """Finish the file. all_sound: copy the rest of the sound; otherwise the sound ends with the last frame."""
        try:
            if self.frames:
                self._container.mux(self._stream.encode(None))
            if self._sound is not None:
                end = (self._last_tick or 0) * self.time_base + 1 / self.rate
                self._sound.copy(None if all_sound else end, self._shift)
        finally:
            self._close()

    def _close(self) -> None:
        if self._sound is not None:
            self._sound.close()
        self._container.close()


class Sound:
    """Copies the sound of a file into a container that is being written, packet by packet with its times."""

    def __init__(self, path: Path, output: Any) -> None:
        self._av = import_av()
        self._input, self._output = self._av.open(str(path), metadata_errors="replace"), output
        self._tracks: dict[int, Any] = {}
        self._filters: dict[int, Any] = {}
        self.silent = ""
        supported = output.supported_codecs
        for stream in self._input.streams.audio:
            name = stream.codec_context.name if stream.codec_context is not None else "an unknown codec"
            if name not in supported:
                self.silent = f"its sound ({name}) does not fit into a {output.format.name} file"
                continue
            copied = output.add_stream_from_template(stream)
            copied.metadata.update(stream.metadata)
            self._tracks[stream.index] = copied
            if name == "aac" and not stream.codec_context.extradata:  # broadcast: every packet has a header
                filters = importlib.import_module("av.bitstream")
                self._filters[stream.index] = filters.BitStreamFilterContext("aac_adtstoasc", stream)
        tracks = [self._input.streams[index] for index in self._tracks]
        self._packets = self._input.demux(tracks) if tracks else iter(())
        self._next: Any = None
        self._last_dts: dict[int, int] = {}

    def copy(self, until: Fraction | None, shift: Fraction) -> None:
        """Copy the sound before a time in seconds, or all the rest; add `shift` seconds to its times."""
        while (packet := self._next or self._read()) is not None:
            self._next = packet
            if until is not None and packet.dts * packet.time_base + shift > until:
                return
            self._next, index = None, packet.stream.index
            shift_ticks = round(shift / packet.time_base)
            packet.dts += shift_ticks
            packet.pts = packet.dts if packet.pts is None else packet.pts + shift_ticks
            if packet.dts <= self._last_dts.get(index, packet.dts - 1):
                continue  # muxers refuse times that step back
            self._last_dts[index] = packet.dts
            for filtered in self._filters[index].filter(packet) if index in self._filters else [packet]:
                filtered.stream = self._tracks[index]
                self._output.mux(filtered)

    def _read(self) -> Any:
        """Return the next packet with a time; None at the end, or where the file breaks off."""
        with contextlib.suppress(self._av.FFmpegError):
            for packet in self._packets:
                if packet.dts is not None and packet.size:
                    return packet
        return None

    def close(self) -> None:
        """Close the file that is copied from."""
        self._input.close()
