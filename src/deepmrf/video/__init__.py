"""Video: read frames with their times, segment them, and write label maps and overlays.

    segmenter = deepmrf.load("street")
    for time, frame, result in deepmrf.video.segment_video(segmenter, "drive.mp4"):
        ...                                       # seconds, the frame, its Segmentation
    report = deepmrf.video.record(segmenter, "drive.mp4", "out.mp4")

reading       FrameSource: video files, folders of images and cameras as frames with exact times
writing       Writer: a video file, with the sound of another file
windows       models that look at several frames: each frame between its neighbours, linked along the flow
streaming     segment_video: reading, flow and network at the same time, with few frames in memory
earlier       what an earlier recording has done, and which files may be replaced
recording     record: the overlay and the label maps of a video
report        VideoReport: what was written, what it shows, what was wrong
clock         how long each stage takes
"""

from deepmrf.video.earlier import ExistingFileError
from deepmrf.video.reading import Frame, FrameSource, open_source
from deepmrf.video.recording import record
from deepmrf.video.report import VideoReport
from deepmrf.video.streaming import FrameResult, Stream, segment_video
from deepmrf.video.writing import Writer

__all__ = [
    "ExistingFileError",
    "Frame",
    "FrameResult",
    "FrameSource",
    "Stream",
    "VideoReport",
    "Writer",
    "open_source",
    "record",
    "segment_video",
]
