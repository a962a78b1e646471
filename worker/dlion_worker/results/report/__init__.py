"""`report.html`: one page that shows one run, or several side by side, and needs nothing else.

`runs` loads result folders, `drawing` turns figures of Matplotlib into inline SVG that follows the
page's colours, `progress_charts` and `resource_charts` are the pictures, `page` puts them into
`page.html`. `dlion report` calls `page.render`. Nothing is fetched by the page: no script, no font,
no style from elsewhere.
"""
