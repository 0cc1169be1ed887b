"""Pictures of what was compiled.

In: an `Explanation`, the value that `fulgurite explain` prints. Out: one HTML file that needs nothing else: no
network, no other file, no library.

    html.py     the page, top to bottom            markup.py   elements; what is not markup is escaped
    tables.py   numbers: tables and small bars     stages.py   every stage's lines, and which belong together
    graph.py    boxes and edges as SVG             items.py    a trace as boxes, at a depth of module paths
    layout.py   where the boxes go, in linear time
    page.css    light, dark and paper              page.js     search, themes, start
    stages.js   two stages side by side            picture.js  zoom, pointing, keyboard    shared.js
"""

from fulgurite.report.html import write_html

__all__ = ["write_html"]
