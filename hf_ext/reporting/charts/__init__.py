"""Charts: each is drawn once with matplotlib's objects, and is a PNG file or an SVG in a page."""
