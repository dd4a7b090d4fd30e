"""The public API as a list. Programs and shell scripts rely on it: edit it only when you change it on purpose."""

from __future__ import annotations

import importlib
import inspect

import pytest
import typer

import deepmrf
import deepmrf.evaluation.intervals
from deepmrf.cli import app

NAMES = {
    "deepmrf": "DeepParsingNetwork InputWarning LabelContexts LabelSet MeanField Segmentation Segmenter TriplePenalty "
    "crf_rnn dense_crf load ops",
    "deepmrf.refine.cluster": "predict refine",
    "deepmrf.data": "ANIMALS CAMVID CITYSCAPES VOC Augment DataError DataReport Dataset Item LabelSet add_sbd animals "
    "camvid check cityscapes coco folder get open_data synthetic voc write_folder",
    "deepmrf.densecrf": "CONST_KERNEL DIAG_KERNEL FULL_KERNEL NORMALIZE_AFTER NORMALIZE_BEFORE NORMALIZE_SYMMETRIC "
    "NO_NORMALIZATION DenseCRF DenseCRF2D KernelType NormalizationType bilateralfilter bilateralfilter_batch utils",
    "deepmrf.export": "TOLERANCE Comparison centre_crops check_path compare export synthetic_images",
    "deepmrf.flow": "Flow between cached compose consistent estimate inside join read_flo warp",
    "deepmrf.layers": "InputWarning LabelContexts LabelScaling MeanField TriplePenalty crf_rnn dense_crf",
    "deepmrf.losses": "DenseCRFLoss GatedCRFLoss",
    "deepmrf.ops": "distance_penalty gaussian_blur gaussian_penalty label_contexts local_sum low_rank_contexts "
    "separate strided_contexts use",
    "deepmrf.unary": "VGG16 DeepLab Dilation8 FCN8s Fast Loaded SegNet Strong Volume Wrapped build from_smp "
    "from_torchvision from_transformers wrap",
    "deepmrf.video": "ExistingFileError Frame FrameResult FrameSource Stream VideoReport Writer open_source record "
    "segment_video",
}
"""Package: what its __all__ holds."""

PARAMETERS = {
    "MeanField": "labels dims window contexts context_size context_rank context_stride iterations kernel gate features "
    "unary spacing average smoothness normalize size temporal temperature label_scaling",
    "MeanField.forward": "self log_p image flow frames",
    "MeanField.belief": "self log_p",
    "MeanField.tempered": "self log_p",
    "MeanField.from_penalty": "self log_p t",
    "MeanField.energy": "self labels log_p image",
    "MeanField.free_energy": "self log_q log_p image",
    "MeanField.inflate": "self window_frames context_frames frame_spacing",
    "MeanField.compress": "self rank stride",
    "MeanField.reach": "self",
    "TriplePenalty": "window dims kernel gate features spacing average smoothness normalize size temporal",
    "TriplePenalty.forward": "self q image norms links",
    "TriplePenalty.weights": "self",
    "TriplePenalty.widths": "self",
    "LabelContexts": "labels contexts size dims rank stride",
    "LabelContexts.forward": "self t links",
    "LabelContexts.set_compatibility": "self compatibility",
    "LabelContexts.compress": "self rank stride",
    "dense_crf": "labels dims window iterations appearance colour_width position_width smoothness smooth_width "
    "normalize features spacing learn",
    "crf_rnn": "labels iterations learn settings",
    "load": "name more device scales flip tile size max_pixels network min_area min_confidence",
    "Segmenter": "models device scales flip tile size max_pixels min_area min_confidence",
    "Segmenter.__call__": "self image probabilities",
    "Segmenter.batch": "self images probabilities progress",
    "Segmenter.shrunk": "self image",
    "Segmenter.to": "self device",
    "Segmenter.for_video": "self full_precision",
    "DeepParsingNetwork": "unary mean_field labels card",
    "DeepParsingNetwork.build": "network labels options mrf",
    "DeepParsingNetwork.forward": "self image flow",
    "DeepParsingNetwork.log_unary": "self image",
    "DeepParsingNetwork.refined": "self log_p image flow frames",
    "DeepParsingNetwork.inflate": "self window_frames context_frames",
    "DeepParsingNetwork.for_video": "self",
    "DeepParsingNetwork.config": "self",
    "DeepParsingNetwork.summary": "self",
    "Segmentation": "labels confidence image label_set probabilities",
    "Segmentation.__getitem__": "self name",
    "Segmentation.__contains__": "self name",
    "Segmentation.summary": "self",
    "Segmentation.totals": "self",
    "Segmentation.cleaned": "self min_area min_confidence",
    "Segmentation.overlay": "self opacity longest legend",
    "Segmentation.polygons": "self name",
    "Segmentation.mask": "self",
    "Segmentation.save": "self path",
    "Segmentation.save_labels": "self path note",
    "Segmentation.save_overlay": "self path longest legend",
    "cluster.predict": "paths out model address workers device options recursive progress",
    "cluster.refine": "mrf labels predictions images out address workers device progress options",
    "data.open_data": "spec split",
    "evaluation.intervals.measure_gain": "before after names runs stretch draws level seed",
    "export.export": "model path images tolerance",
    "flow.estimate": "frames method",
    "losses.DenseCRFLoss": "colour_width position_width scale ignore_labels nonnegative",
    "losses.GatedCRFLoss": "window colour_width position_width ignore_labels nonnegative",
    "ops.distance_penalty": "q features weights window spacing gate frame",
    "ops.gaussian_penalty": "q features weights bandwidths window spacing gate frame",
    "ops.label_contexts": "t weight bias contexts",
    "unary.build": "name labels options",
    "unary.from_smp": "model options",
    "unary.from_torchvision": "model options",
    "unary.from_transformers": "model processor options",
    "unary.wrap": "module labels mean std value_range output multiple",
    "video.record": "segmenter source out labels flow consistency max_frames fps "
    "frame_by_frame full_precision legend overwrite resume progress",
    "video.segment_video": "segmenter source flow consistency max_frames fps frame_by_frame full_precision",
}
"""Callable of deepmrf: names of its parameters, in their order."""

PROPERTIES = {
    "MeanField": "iterations temperature",
    "Segmenter": "identity labels model",
    "DeepParsingNetwork": "for_volumes",
    "Segmentation": "colours names",
}

COMMANDS = {
    "predict": "INPUTS --out -o --model -m --scales --flip --tile --size --device --batch --overlay --no-overlay "
    "--legend --no-legend --min-area --min-confidence --probabilities --masks --overwrite "
    "--recursive -r --json --coco --max-pixels --labels --frames-as-video "
    "--fps --max-frames --flow --frame-by-frame --full-precision --consistency --network --ray --workers --open",
    "app": "--model -m --host --port --device --max-megabytes --max-megapixels --open",
    "models": "NAME --time --device --json",
    "train": "RECIPE --out -o --set --resume --list --network",
    "evaluate": "MODELS --data --split --images --scales --flip --stages --objects --video --device --pictures --out "
    "-o --submission --network --masks --labels",
    "explain": "MODEL --out -o --data --split --image --pixel --pairs --network",
    "calibrate": "MODEL --data --split --temperature -t --device --out -o --network",
    "fit": "--predictions --images --masks --out -o --minutes --groups --folds --kernel --gate --no-gate --temperature "
    "--label-scaling --no-label-scaling --overwrite "
    "--window --contexts --context-size --crop --batch "
    "--penalty-steps --contexts-steps --labels --seed --device",
    "refine": "MRF --predictions --images --out -o --preset --set --gt-prob --soft-mask --no-soft-mask "
    "--labels --probabilities --overlays --overwrite --workers --device --ray",
    "export": "MODEL --out -o --image --tolerance --network-only --network",
    "bench": "",  # passed on to benchmarks/bench
    "doctor": "--json",
    "data get": "NAME --to",
    "data check": "NAME PATH --split",
}
"""Command: its arguments and options."""


def look_up(name):
    value = deepmrf
    for step in name.split("."):
        value = getattr(value, step)
    return value


@pytest.mark.parametrize("package", NAMES)
def test_names(package):
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(NAMES[package].split())
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_the_cluster_has_a_short_name():
    assert deepmrf.cluster is importlib.import_module("deepmrf.refine.cluster")


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name):
    assert list(inspect.signature(look_up(name)).parameters) == PARAMETERS[name].split()


@pytest.mark.parametrize("name", PROPERTIES)
def test_properties(name):
    for property_name in PROPERTIES[name].split():
        assert not callable(inspect.getattr_static(look_up(name), property_name))


def commands(group, prefix=""):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def words(command):
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            yield parameter.name.upper()
        else:
            yield from (*parameter.opts, *parameter.secondary_opts)


def test_commands_and_their_options():
    actual = {name: sorted(words(command)) for name, command in commands(typer.main.get_command(app))}
    assert actual == {name: sorted(text.split()) for name, text in COMMANDS.items()}
