"""Video: frames in with their times, labels and overlays out, and no more than a few frames in memory.

    segmenter = deepmrf.load("street")
    for time, frame, found in deepmrf.video.segment_video(segmenter, "drive.mp4"):
        ...                                       # seconds, the frame, a Segmentation
    deepmrf.video.record(segmenter, "drive.mp4", "out.mp4")

reading       video files, folders of frames and cameras as frames with exact times
writing       a video file: encoder, times, sound copied from another file
streaming     segment_video: reading, flow and network at the same time
windows       models that see several frames: the frames around each, linked along the flow
recording     record: overlays and label maps of a whole video, and what was found in it
threads       work done ahead and behind, in threads with short queues
"""

from deepmrf.video.reading import Frame, Source, open_source
from deepmrf.video.recording import Recording, record
from deepmrf.video.streaming import Seen, Stream, segment_video
from deepmrf.video.writing import Writer

__all__ = [
    "Frame",
    "Recording",
    "Seen",
    "Source",
    "Stream",
    "Writer",
    "open_source",
    "record",
    "segment_video",
]
