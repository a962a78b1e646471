"""`report.html`: a self-contained page that shows one or several runs.

`runs` loads result folders. `headline` and `tiles` say what came out; `curve_charts` and
`link_charts` compute what `static/page.js` draws in the browser, with Observable Plot. `page`
renders the templates. `palette` owns the colours.

The pictures (`picture`, `comparison_picture`) are SVG files by Matplotlib: `drawing` has their
style, `progress_charts` and `resource_charts` their charts. No output loads anything else.
"""
