"""Models: a unary network and its MRF together, saved in a folder and found by name.

parsing_network   DeepParsingNetwork: network (b1 to b11) and mean field (b12 to b15)
video_part        VideoPart: what a model for images needs besides, to link the frames of a video
schema            kinds and limits of all settings, and the bytes of a model before it is built
folder            the model folder: config.json and model.safetensors
names             models by name: bundled, in a folder, on the hub; ModelSummary, read without building a model
"""
