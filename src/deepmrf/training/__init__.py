"""Training: the paper's four stages, from a recipe to a saved model.

recipe       a TOML file as frozen dataclasses
recipes      the recipes that come with deepmrf, by name
start        folder, data and model that a run starts from
loop         the loop over stages and steps
run          what a run saves, resumes from, measures and reports
stages       which parts of the model a stage learns, runs and caches
mean_field   how stages 2 and 3 teach an MRF
batches      batches of a stage, with cached outputs
samples      training samples of images
clips        training samples of clips
motion       clips from single images that move
loss         cross-entropy and Lovász
optimiser    parameter groups, learning rates, moving average
checkpoint   the state of a run in one file
memory       does a step fit into memory?
lock         one training at a time in a folder
"""
