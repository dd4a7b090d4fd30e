"""Training: the paper's four stages, from a recipe to a saved model.

recipe    a TOML file as frozen dataclasses
start     folder, data and model that a run starts from
stages    which parameters a stage teaches, and how fast
samples   what a training step sees of images
clips     what a training step sees of videos
motion    clips made of single images
loop      the loop over stages and steps
loss      cross-entropy and Lovász
"""
