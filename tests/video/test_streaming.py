"""segment_video: every frame once, in order, few at a time; and models that see several frames."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from fractions import Fraction

import numpy as np
import pytest
import torch

from deepmrf.evaluation.videos import same_network
from deepmrf.flow import estimate, warp
from deepmrf.layers import MeanField
from deepmrf.models.parsing_network import DeepParsingNetwork, read_model
from deepmrf.models.video_part import VideoPart
from deepmrf.predict.frames import frame_reach
from deepmrf.predict.segmenter import Segmenter
from deepmrf.video import FrameSource, segment_video, streaming, windows

pytestmark = pytest.mark.usefixtures("plain_torch")


class Given(FrameSource):
    """Frames from an array; counts those that were asked for."""

    name = stem = "given"

    def __init__(self, frames, fail=None):
        self.pictures, self.fail, self.asked, self.length, self.closed = frames, fail, 0, len(frames), False

    def _raw(self):
        try:
            for number, image in enumerate(self.pictures):
                if number == self.fail:
                    raise OSError("the disk is gone")
                self.asked += 1
                yield image, Fraction(number, 25), f"{number:06}"
        finally:
            self.closed = True


@pytest.fixture
def clip_model(model_folder):
    """A model whose mean field looks one frame farther in b12 and one in b13, and whose frames do matter."""
    torch.manual_seed(3)
    model = read_model(model_folder).inflate()
    with torch.no_grad():
        model.mean_field.triple_penalty.frame_weights.fill_(0.8)
        model.mean_field.label_contexts.weight.normal_(std=0.3)
    return model.eval()


@pytest.fixture
def linking_model(model_folder):
    """A model for images with a part for video, whose links do matter."""
    torch.manual_seed(3)
    model = read_model(model_folder)
    torch.nn.init.normal_(model.mean_field.label_contexts.weight, std=0.3)
    model.video = VideoPart(5)
    model.video.trajectory_weights.fill_(2.0)
    return model.eval()


def test_models_of_single_frames_see_each(segmenter, pictures):
    frames = pictures(7, (33, 47))
    results = list(segment_video(segmenter, Given(frames)))
    assert [item.time for item in results] == [n / 25 for n in range(7)]
    for (_, frame, result), image in zip(results, frames, strict=True):
        np.testing.assert_array_equal(frame.image, image)
        np.testing.assert_array_equal(result.labels, segmenter(image).labels)
        assert result.image is frame.image


@pytest.mark.parametrize("linked", [False, True])
def test_a_loop_that_is_left_early_closes_the_video_at_once(segmenter, linking_model, film, linked):
    """Without the collector of garbage: no frame, thread or file waits for it."""
    gc.disable()
    try:
        before = threading.active_count()
        for _ in segment_video(Segmenter(linking_model) if linked else segmenter, film("a.mp4")):
            assert threading.active_count() > before
            break
        assert threading.active_count() == before
    finally:
        gc.enable()


def test_a_video_file(segmenter, film, pictures):
    frames = pictures(4, (32, 48))
    stream = segment_video(segmenter, film("a.mov", frames, [0, 5, 6, 9]))
    assert stream.length == 4
    results = list(stream)
    assert [item.frame.time for item in results] == [Fraction(n, 25) for n in (0, 5, 6, 9)]
    np.testing.assert_array_equal(results[3].result.labels, segmenter(frames[3]).labels)
    assert {"reading", "network"} <= set(stream.seconds)
    assert stream.consistency is None


@pytest.mark.parametrize("spans", [False, True])
def test_few_frames_are_held_at_a_time(segmenter, clip_model, pictures, spans):
    source = Given(pictures(60, (16, 24)))
    stream = segment_video(Segmenter([clip_model], device="cpu") if spans else segmenter, source, consistency=True)
    most = 0
    for number, _ in enumerate(stream):
        most = max(most, source.asked - number)
    waiting = 2 * (streaming.FRAMES_READ_AHEAD + 2) + (windows.FRAMES_PER_WINDOW + 2 if spans else 0)
    assert number == 59
    assert most <= waiting + 2


def test_closing_lets_go(segmenter, pictures):
    before, source = threading.active_count(), Given(pictures(40, (16, 24)))
    with segment_video(segmenter, source, consistency=True) as stream:
        next(stream)
    assert source.closed
    assert threading.active_count() == before
    assert source.asked < 40


def test_max_frames(segmenter, pictures):
    source = Given(pictures(40, (16, 24)))
    stream = segment_video(segmenter, source, max_frames=3)
    assert (stream.length, len(list(stream))) == (3, 3)
    assert source.closed
    assert source.asked == 3
    with pytest.raises(ValueError, match="max_frames=0 must be at least 1"):
        segment_video(segmenter, source, max_frames=0)


def test_an_error_comes_after_the_frames_before_it(segmenter, pictures):
    stream = segment_video(segmenter, Given(pictures(9, (16, 24)), fail=5))
    assert [next(stream).frame.name for _ in range(5)] == [f"{n:06}" for n in range(5)]
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)


def test_consistency(segmenter, pictures):
    still = pictures(1, (48, 64)).repeat(4, 0)
    stream = segment_video(segmenter, Given(still), consistency=True)
    list(stream)
    assert stream.consistency == 1.0
    cuts = np.random.default_rng(0).integers(0, 256, (4, 48, 64, 3), dtype=np.uint8)
    stream = segment_video(segmenter, Given(cuts), consistency=True, flow=lambda a, b: np.zeros((*a.shape[:2], 2)))
    labels = [item.result.labels for item in stream]
    agreeing = np.mean([(a == b).mean() for a, b in itertools.pairwise(labels)])
    assert agreeing < 1
    assert stream.consistency == pytest.approx(agreeing)
    with pytest.raises(ValueError, match="choose a flow"):
        segment_video(segmenter, Given(cuts), consistency=True, flow=None)


def test_flow_and_agreement_are_measured_on_smaller_frames(segmenter, pictures, monkeypatch):
    monkeypatch.setattr(streaming, "FLOW_SIDE", 32)
    sizes = set()

    def still(first, second):
        sizes.add(first.shape)
        return np.zeros((*first.shape[:2], 2))

    stream = segment_video(segmenter, Given(pictures(1, (48, 64)).repeat(3, 0)), consistency=True, flow=still)
    list(stream)
    assert sizes == {(24, 32, 3)}
    assert stream.consistency == 1.0


def whole_clip(model, frames, linked):
    """What the model says of all frames at once: labels (T, H, W), probabilities (L, T, H, W)."""
    flow = estimate(frames, "dis-fast") if linked and len(frames) > 1 else None
    clip = torch.from_numpy(np.ascontiguousarray(frames.transpose(3, 0, 1, 2)))[None]
    with torch.inference_mode():
        probabilities = model(clip, flow)[0].exp()
    return probabilities.argmax(0).numpy(), probabilities.numpy()


@pytest.mark.parametrize("count", [1, 2, 5, 13])
@pytest.mark.parametrize("linked", [True, False], ids=["flow", "rigid"])
def test_windows_give_what_the_whole_clip_would(clip_model, pictures, count, linked):
    frames = pictures(count, (33, 47))
    stream = segment_video(Segmenter([clip_model], device="cpu"), Given(frames), flow="dis-fast" if linked else None)
    results = list(stream)
    assert [item.frame.name for item in results] == [f"{n:06}" for n in range(count)]
    labels, probabilities = whole_clip(clip_model, frames, linked)
    np.testing.assert_array_equal(np.stack([item.result.labels for item in results]), labels)
    confidence = np.stack([item.result.confidence for item in results])
    np.testing.assert_allclose(confidence, probabilities.max(0), atol=2e-3)  # kept as float16
    assert (stream.consistency is None) == (not linked or count == 1)


@pytest.mark.parametrize("frames_seen", [2, 3, 4])
def test_windows_of_an_even_number_of_frames_look_back_farther(model_folder, pictures, frames_seen):
    torch.manual_seed(3)
    model = read_model(model_folder)
    torch.nn.init.normal_(model.mean_field.label_contexts.weight, std=0.3)
    model = model.inflate(frames_seen, 1).requires_grad_(False).eval()
    model.mean_field.trajectory_weights.fill_(2.0)
    frames = pictures(6, (33, 47))
    with segment_video(Segmenter([model], device="cpu"), Given(frames)) as stream:
        confidence = np.stack([item.result.confidence for item in stream])
    np.testing.assert_allclose(confidence, whole_clip(model, frames, True)[1].max(0), atol=2e-3)  # kept as float16


@pytest.fixture
def global_model(linking_model):
    """A model for images with a part for video, whose mean field over all pairs of pixels cannot be inflated."""
    torch.manual_seed(4)
    mean_field = MeanField(linking_model.mean_field.labels, kernel="global", gate=False, contexts=1, context_size=1)
    mean_field.label_contexts.set_compatibility(torch.randn(mean_field.labels, mean_field.labels))
    with torch.no_grad():
        mean_field.triple_penalty.scale.fill_(0.02)
    model = DeepParsingNetwork(linking_model.unary, mean_field, linking_model.labels).eval()
    model.video = VideoPart(5)
    model.video.trajectory_weights.copy_(torch.tensor([0.7, 0.4]))
    return model


@pytest.fixture
def normalised_model(linking_model):
    """A model for images with a part for video, whose window sums are divided by those of the weights."""
    settings = {**linking_model.mean_field.settings, "kernel": "gaussian", "smoothness": True, "normalize": True}
    mean_field = MeanField(**settings)
    mean_field.label_contexts.load_state_dict(linking_model.mean_field.label_contexts.state_dict())
    with torch.no_grad():
        mean_field.triple_penalty.log_colour_width.fill_(0.5)
    model = DeepParsingNetwork(linking_model.unary, mean_field, linking_model.labels).eval()
    model.video = linking_model.video
    return model


@pytest.mark.parametrize("kind", ["linking_model", "normalised_model"])
@torch.inference_mode()
def test_frames_that_meet_on_trajectories_alone_are_computed_one_by_one(kind, request, pictures, monkeypatch):
    model, frames = request.getfixturevalue(kind), pictures(4, (33, 47))
    assert model.for_video().mean_field.links_frames_alone()
    assert frame_reach(model.for_video().mean_field) == 2

    def windows_are_slow(*_):
        raise AssertionError("a window of frames was computed as a clip")

    monkeypatch.setattr(DeepParsingNetwork, "refined", windows_are_slow)
    assert len(list(segment_video(Segmenter([model], device="cpu"), Given(frames)))) == 4
    model.video.frame_weights = model.video.frame_weights + 0.1
    with pytest.raises(AssertionError, match="as a clip"):
        list(segment_video(Segmenter([model], device="cpu"), Given(frames)))


@torch.inference_mode()
def test_results_of_single_frames_are_linked_where_the_mean_field_cannot_be_inflated(global_model, pictures):
    frames = pictures(4, (33, 47))
    flow, clips = estimate(frames), global_model.for_video()
    clip = torch.from_numpy(frames).permute(3, 0, 1, 2)[None]
    alone = torch.stack([global_model(clip[:, :, t]) for t in range(4)], 2)
    torch.testing.assert_close(clips.log_unary(clip), alone)
    expected = []
    for t in range(4):
        log_q = alone[:, :, t].clone()
        for dt, (way, reliable) in flow.trajectories(2, 2, slice(t, t + 1)).items():
            if 0 <= t + dt < 4:
                weight = global_model.video.trajectory_weights[abs(dt) - 1]
                log_q += weight * torch.where(reliable[:, :, 0], warp(alone[:, :, t + dt].exp(), way[:, :, 0]), 0)
        expected.append(log_q.log_softmax(1))
    torch.testing.assert_close(clips(clip, flow), torch.stack(expected, 2), atol=1e-4, rtol=1e-4)
    global_model.video.frame_weights.fill_(0.1)
    with pytest.raises(ValueError, match="kernel='global' sees single frames"):
        global_model.for_video()


def test_linked_results_share_no_output_with_the_network_alone(global_model):
    clips = global_model.for_video()
    assert not same_network(global_model, clips)
    assert same_network(clips, global_model.for_video())


@pytest.mark.parametrize("count", [1, 3, 11])
@pytest.mark.parametrize("kind", ["linking_model", "normalised_model", "global_model"])
def test_a_part_for_video_links_frames_by_default(kind, request, pictures, count):
    frames, linking_model = pictures(count, (33, 47)), request.getfixturevalue(kind)
    segmenter = Segmenter([linking_model], device="cpu")

    def labels_of(**options):
        with segment_video(segmenter, Given(frames), **options) as stream:
            return np.stack([item.result.labels for item in stream])

    alone = np.stack([segmenter(frame).labels for frame in frames])
    linked = whole_clip(linking_model.for_video(), frames, True)[0]
    np.testing.assert_array_equal(labels_of(), linked)
    np.testing.assert_array_equal(labels_of(frame_by_frame=True), alone)
    np.testing.assert_array_equal(labels_of(flow=None), alone)
    assert (linked != alone).mean() > 0.005 or count == 1
    tiled = Segmenter([linking_model], device="cpu", tile=64)
    with segment_video(tiled, Given(frames)) as stream:
        assert not stream.spans_time


@pytest.mark.parametrize("fast", [True, False])
def test_networks_compute_in_bfloat16_where_that_is_faster_and_allowed(linking_model, pictures, monkeypatch, fast):
    monkeypatch.setattr("deepmrf.predict.segmenter.is_fast_in_bfloat16", lambda device: fast)
    frames, kinds = pictures(3, (33, 47)), []
    linking_model.unary.classify.register_forward_hook(lambda module, given, logits: kinds.append(logits.dtype))
    segmenter = Segmenter([linking_model], device="cpu")

    def kinds_of(**options):
        kinds.clear()
        with segment_video(segmenter, Given(frames), **options) as stream:
            labels = np.stack([item.result.labels for item in stream])
        return set(kinds), labels, stream.segmenter.identity

    plain = kinds_of()
    linking_model.video.allows_bfloat16 = True
    half, full, alone = kinds_of(), kinds_of(full_precision=True), kinds_of(frame_by_frame=True)
    assert plain[0] == full[0] == alone[0] == {torch.float32}
    assert half[0] == ({torch.bfloat16} if fast else {torch.float32})
    np.testing.assert_array_equal(full[1], plain[1])
    assert (half[1] == full[1]).mean() > 0.95
    assert full[2] == plain[2]
    assert (half[2] != full[2]) == fast
    assert segmenter(frames[0]).labels.shape == (33, 47)
    assert kinds[-1] == torch.float32  # images are segmented as before


def test_identity_tells_linked_frames_from_others(linking_model, model_folder):
    segmenter = Segmenter([linking_model], device="cpu", size=96, min_area=3)
    linked, before = segmenter.for_video(), segmenter.identity
    assert (linked.size, linked.min_area) == (96, 3)
    assert linked.identity != before
    linking_model.video = None
    assert Segmenter([linking_model], device="cpu", size=96, min_area=3).identity == before
    assert segmenter.for_video() is segmenter


def test_identity_knows_the_mean_field_of_each_frame(global_model):
    def identity():
        return Segmenter([global_model], device="cpu").for_video().identity

    before = identity()
    assert identity() == before
    global_model.mean_field.temperature = 2.5
    assert identity() != before


def test_other_frames_do_matter_here(clip_model, pictures):
    frames = pictures(5, (33, 47))
    alone = np.stack([whole_clip(clip_model, frames[n : n + 1], False)[0][0] for n in range(5)])
    assert (alone != whole_clip(clip_model, frames, True)[0]).mean() > 0.01


def test_reach_in_time(clip_model, segmenter):
    assert frame_reach(clip_model.mean_field) == 2
    assert frame_reach(segmenter.model.mean_field) == 0
    assert frame_reach(None) == 0


def test_flips_scales_and_several_models_are_averaged(clip_model, segmenter, pictures):
    frames = pictures(6, (32, 48))
    both = Segmenter([clip_model, segmenter.model], device="cpu", flip=True)
    results = list(segment_video(both, Given(frames), flow=None))
    mirrored = frames[:, :, ::-1]
    clips = (whole_clip(clip_model, frames, False)[1] + whole_clip(clip_model, mirrored, False)[1][..., ::-1]) / 2
    for number, item in enumerate(results):
        single = Segmenter([segmenter.model], device="cpu", flip=True)(frames[number]).probabilities
        expected = (clips[:, number] + single) / 2
        np.testing.assert_allclose(item.result.confidence, expected.max(0), atol=2e-3)
    scaled = Segmenter([clip_model], device="cpu", scales=(0.5, 1.0), size=64)
    assert len(list(segment_video(scaled, Given(pictures(3, (48, 96)))))) == 3


def test_what_videos_cannot_have(clip_model, pictures):
    with pytest.raises(ValueError, match="tile=64 is for images"):
        segment_video(Segmenter([clip_model], device="cpu", tile=64), Given(pictures(2, (16, 24))))


class Keeping(torch.nn.Module):
    """A network of the user's own that keeps what it sees between two of its lines, as many do."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, image):
        self.seen = image
        time.sleep(0.005)
        return self.network(self.seen)


@pytest.mark.parametrize("linked", [False, True])
def test_frames_side_by_side_are_those_one_after_the_other(segmenter, linking_model, pictures, linked):
    if linked:
        segmenter = Segmenter(linking_model, device="cpu")
    frames, threads = pictures(9, (32, 48)), torch.get_num_threads()
    try:
        labels = []
        for count in (1, 3):
            torch.set_num_threads(count)
            labels.append([result.labels for _, _, result in segment_video(segmenter, Given(frames))])
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert len(labels[0]) == 9
    assert np.array_equal(*labels)


def test_networks_of_the_users_own_see_one_frame_at_a_time(segmenter, pictures):
    frames, threads = pictures(9, (32, 48)), torch.get_num_threads()
    expected = [segmenter(frame).labels for frame in frames]
    segmenter.model.unary = Keeping(segmenter.model.unary)
    torch.set_num_threads(3)
    try:
        labels = [result.labels for _, _, result in segment_video(segmenter, Given(frames))]
    finally:
        torch.set_num_threads(threads)
    assert np.array_equal(labels, expected)
