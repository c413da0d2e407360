"""MkDocs' hook: files outside docs/ that the documentation links to are pages of the site, below ``repository/``.

Markdown files are pages as they are, and their own links are followed; other texts are shown as code, pictures copied.
The search skips pages for developers, and the copy button of a console block copies the commands alone.
"""

import html
import json
import os
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FIRST = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
LANGUAGES = {".py": "python", ".ipynb": "python", ".sh": "sh", ".json": "json"}
PICTURES = {".png", ".svg"}
LINK = re.compile(r"(?<=\]\()([^()\s:#]+)(?=[#)])")
LOADED = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=["'](?:https?:)?//[^>]*>""")
UNSEARCHED = ("dev/", "decisions/", "repository/")
BOOSTS = {
    "collectives": 2,
    "reference/index": 2,
    "reference/": 0.5,
    "from_torchmpi": 0.5,
    "from_0.1": 0.5,
}
CODE = re.compile(r"<pre>(?=(?:(?!</pre>).)*<span class=\"gp\">\$ )(.*?)</pre>", re.DOTALL)
_source_of: dict[str, Path] = {}  # file in the repository, by its place in the site


def linked(source):
    """Files of the repository that a Markdown file links to by relative paths."""
    targets = [(source.parent / link).resolve() for link in LINK.findall(source.read_text())]
    return [target for target in targets if target.is_file() and target.is_relative_to(ROOT)]


def site_path(path):
    """Place in the site of a file of the repository, in the form of MkDocs' source paths."""
    if path.is_relative_to(DOCS):
        return str(path.relative_to(DOCS))
    as_code = path.suffix not in {".md", *PICTURES}
    return f"repository/{path.relative_to(ROOT)}{'.md' if as_code else ''}"


def on_files(files, config):
    """The files of docs/, and those outside that they lead to, directly or through others."""
    queue = [*DOCS.rglob("*.md"), *(ROOT / name for name in FIRST)]
    for source in queue:
        queue += [path for path in linked(source) if path.suffix == ".md" and path not in queue]
        for path in [source, *linked(source)]:
            _source_of[site_path(path)] = path
            if not path.is_relative_to(DOCS) and files.get_file_from_path(site_path(path)) is None:
                files.append(outside(path, config))
    return files


def outside(path, config):
    """The site's file for a file outside docs/. A notebook is shown without its outputs."""
    if path.suffix in {".md", *PICTURES}:
        return File.generated(config, site_path(path), abs_src_path=str(path))
    parts = [f"# {path.relative_to(ROOT)}"]
    cells = json.loads(path.read_text())["cells"] if path.suffix == ".ipynb" else [{"source": path.read_text()}]
    for cell in cells:
        text = "".join(cell["source"])
        parts.append(
            text if cell.get("cell_type") == "markdown" else f"```{LANGUAGES.get(path.suffix, '')}\n{text}\n```"
        )
    return File.generated(config, site_path(path), content="\n\n".join(parts))


def on_page_markdown(markdown, page, config, files):
    """The page, with links that lead to the places that their files have in the site."""
    uri = page.file.src_uri
    boost = next((factor for start, factor in BOOSTS.items() if uri.startswith(start)), 1)
    page.meta["search"] = {"exclude": True} if uri.startswith(UNSEARCHED) else {"boost": boost}
    source = _source_of.get(uri)
    if source is None:
        return markdown

    def replaced(match):
        target = (source.parent / match[1]).resolve()
        known = target.is_file() and target.is_relative_to(ROOT)
        return os.path.relpath(site_path(target), os.path.dirname(uri)) if known else match[1]

    return LINK.sub(replaced, markdown)


def commands(text):
    """Commands of a console block without prompts and output; continued lines and here-documents stay."""
    copied, end = [], None  # end: the last line of the here-document or of the continued command; None: output follows
    for line in text.splitlines():
        if line.startswith("$ ") or end is not None:
            copied.append(line.removeprefix("$ "))
            heredoc = re.search(r"(?<!<)<<-?\s*['\"]?([A-Za-z_]\w*)", line) if end is None else None
            if heredoc:
                end = heredoc[1]
            elif not end:
                end = "" if line.endswith("\\") else None
            elif line.strip() == end:
                end = None
    return "\n".join(copied)


def on_page_content(content, page, config, files):
    """The page, with the text that the copy button takes from each console block."""

    def with_commands(match):
        text = html.unescape(re.sub(r"<[^>]*>", "", match[1]))
        return f'<pre data-copy="{html.escape(commands(text)).replace(chr(10), "&#10;")}">{match[1]}</pre>'

    return CODE.sub(with_commands, content)


def on_post_page(output, page, config):
    """The page as it is; a page that loads something from another host is an error."""
    if loaded := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another host: {loaded[0]}")
    return output
