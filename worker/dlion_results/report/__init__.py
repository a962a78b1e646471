"""`report.html`: a self-contained page that shows one or several runs.

`runs` loads result folders. `drawing` converts Matplotlib figures to inline SVG in the page's
colours. `progress_charts` and `resource_charts` draw, `page` renders `page.html`, and `picture`
combines the first charts into one SVG file. Neither output loads scripts, fonts or styles from
elsewhere.
"""
