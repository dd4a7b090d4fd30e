"""Models: a unary network and its MRF as one, saved and found by name.

parsing_network   DeepParsingNetwork: network (b1 to b11) and mean field (b12 to b15)
names             models by name: bundled, in a folder, on the hub
"""
