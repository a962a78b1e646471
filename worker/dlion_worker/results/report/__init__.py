"""`report.html`: one page that shows one run, or several side by side, and needs nothing else.

`runs` loads result folders, `drawing` turns figures of Matplotlib into inline SVG that follows the
page's colours, `progress_charts` and `resource_charts` are the pictures, `page` puts them into
`page.html`, `picture` the first of them into one SVG. `dlion report` calls `page.write_report` and
`picture.write_picture`. Nothing is fetched by either: no script, no font, no style from elsewhere.
"""
