"""`deepmrf app`: a page on this machine to segment pictures, and to move the MRF while looking at the result.

controls     the numbers of an MRF that can be moved, their ranges, and the MRF with other numbers
uploads      read pictures, clips and predictions that somebody has uploaded, within limits
sessions     Session: one person's picture, the network's output for it and results; Sessions: all of them
downloads    results as files
views        what the browser gets of a result: maps to hover over, classes, what changed
page         the page itself, of Gradio's components; viewer.html, viewer.css and viewer.js draw the maps
server       listen, receive files, send results, remove what was written

Only page and server need Gradio.
"""
