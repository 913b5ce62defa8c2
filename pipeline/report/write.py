"""Write `report.md`, `report.html` and pictures of a run, or compare several runs.

A report needs only the files of a run folder. `three-domain-grpo report FOLDER` writes the report
of a run again. `three-domain-grpo report RUN RUN ... --output FOLDER` compares runs.
`three-domain-grpo report FOLDER_OF_RUNS` compares all runs in a folder.
"""

# The way of a report: data -> Markdown -> an HTML page that needs no network. The Markdown consists
# of headings, paragraphs, lists, tables and pictures, with empty lines between them. Names from a
# run folder are escaped, so that a name cannot begin a block or a table cell. The template of the
# page escapes texts of models and environments, or writes the texts as JSON. The content security
# policy of the page allows only the shipped script.

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from pipeline.common.console import command, in_words, say
from pipeline.common.errors import UserError
from pipeline.common.untrusted import printable
from pipeline.config.cli import Parser
from pipeline.report import comparison
from pipeline.report.page_episodes import Reader, read_episodes
from pipeline.report.plots import drawing, pictures
from pipeline.report.run_files import after_name, before_and_after, load_run, number, reading
from pipeline.report.tables import (
    METRIC_NAMES,
    aligned,
    ci_text,
    ends_in_words,
    failures,
    metric,
    pass_hat_table,
    report_data,
    share,
    staleness_in_words,
    start_table,
    success_tables,
)

TEMPLATES = Path(__file__).resolve().parent / "templates"
# patterns and HTML elements of `code`, **importance** and *emphasis*
MARKS = ((r"`([^`]+)`", "code"), (r"\*\*([^*]+)\*\*", "strong"), (r"\*([^*]+)\*", "em"))
LINK = r"\[(<code>[^<]*</code>)\]\(((?:[\w.%~-]+/)+report\.html)\)"  # to another report, no other
AT_THE_END = ("stage_gain", "backward_transfer", "forward_transfer", "forgetting")
COLUMN_CHARACTERS = 84  # a table with longer rows takes the width of both columns of the page
PICTURE = re.compile(r"!\[(?P<caption>.*)\]\((?P<name>\w+)\.png\)")


def write_report(folder: Path) -> None:
    """Write a run's report into its folder; raise UserError if the folder has no run."""
    run = load_run(folder)
    reader = read_episodes(
        folder,
        run.success_threshold,
        run.results.get("reward_parts"),
        unseen=run.results.get("unseen"),
    )
    figures = drawing.draw(pictures.OF_RUN, run)
    write_files(folder / "report", "run.md.jinja", figures, reader, **report_data(run))


def write_comparison(folders: Sequence[Path], output: Path) -> None:
    """Write a comparison of runs into `output`; raise UserError if runs are not comparable."""
    runs, unfinished = comparison.finished(folders)
    for run in unfinished:
        say(
            f"warning: {run.folder} is not finished, or was not evaluated before GRPO, and is left "
            "out"
        )
    configurations = comparison.configurations_of(runs)
    counted = {run.folder for c in configurations for run in c.runs}
    again = [run for run in runs if run.folder not in counted]
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output: got {output}, which cannot be a folder ({error.strerror}); name another"
        ) from None
    functions = {"curves": pictures.curves, "pareto": pictures.pareto}
    write_files(
        output / "comparison",
        "comparison.md.jinja",
        drawing.draw(functions, configurations),
        title=f"Comparison of {sum(len(c.runs) for c in configurations)} runs",
        **comparison.comparison_data(configurations, unfinished, again, output),
    )


def write_files(
    path: Path, template: str, figures: Mapping[str, Any], reader: Reader | None = None, **data: Any
) -> None:
    """Write the pictures, the Markdown file and the HTML page; `path` has no suffix."""
    drawing.save_pictures(figures, path.parent)
    text = printable(render(template, drawn=figures, **data))  # no control characters
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    page = page_of(data["title"], sections_of(text), svgs_of(figures), reader)
    path.with_suffix(".html").write_text(page, encoding="utf-8")


def page_of(
    title: str,
    sections: Sequence[Mapping[str, Any]],
    svgs: Mapping[str, Markup],
    reader: Reader | None = None,
    version: int = 0,
) -> str:
    """Return the HTML page; with a `version`, its script asks the page's server for changes."""
    return filled(
        "page.html",
        title=printable(title),
        sections=sections,
        svgs=svgs,
        reader=reader if reader and reader.chunks else None,
        version=version,
        **parts_of_page("page.js"),
    )


def parts_of_page(script: str) -> dict[str, Any]:
    """Return the style of pages, and a script with its digest, which alone may run."""
    style, *scripts = (
        (TEMPLATES / n).read_text("utf-8") for n in ("page.css", "common.js", script)
    )
    text = "\n".join(scripts)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return {"style": Markup(style), "script": Markup(text), "digest": digest}


def svgs_of(figures: Mapping[str, Any]) -> dict[str, Markup]:
    return {name: Markup(drawing.inline_svg(figure, name)) for name, figure in figures.items()}


def final_table(results: Mapping[str, Any]) -> str:
    """Return the text for the end of a run: success before and after GRPO, rewards, metrics.

    `(!)` marks a domain that failed, and a line below the table has the reason.
    """
    results = {"transfer": {}, **results}
    evaluations = results["evaluations"]
    failed = failures(evaluations)
    ends = before_and_after(evaluations)
    tables = success_tables(results)
    marked = [
        [[f"{name} (!)" if name in failed else name, *cells] for name, *cells in table]
        for table in tables
    ]
    numbers = results["transfer"].get("metrics", {})
    return filled(
        "final.txt.jinja",
        results=results,
        tables=[*marked, *filter(None, [pass_hat_table(results["transfer"])])],
        ends_in_words=ends_in_words(evaluations) if all(ends) else "",
        lacks_start=ends[0] is None and ends[1] is not None,
        failures=failed.values(),
        worse=results.get("worse", {"found": []}),
        numbers=[[METRIC_NAMES[n], metric(numbers[n], n)] for n in AT_THE_END if n in numbers],
    )


def start_block(start: Mapping[str, Any]) -> str:
    """Return the start report as text for the terminal."""
    return filled("start.txt.jinja", start=start, rows=start_table(start))


def filled(template: str, **data: Any) -> str:
    """Fill in an HTML template, which escapes all texts, or a template for the terminal."""
    return environment().get_template(template).render(**data).rstrip("\n")


def sections_of(markdown: str) -> list[dict[str, Any]]:
    """Parse Markdown into sections, each with a title, an anchor and a list of (kind, content)."""
    sections: list[dict[str, Any]] = []
    for block in markdown.strip().split("\n\n"):
        if block.startswith("#"):
            title = block[3:] if block.startswith("## ") else ""
            anchor = re.sub(r"\W+", "-", title.lower()).strip("-")
            sections.append({"title": title, "anchor": anchor, "blocks": []})
        else:
            sections[-1]["blocks"].append(_parsed(block))
    return sections


def _parsed(block: str) -> tuple[str, Any]:
    if picture := PICTURE.fullmatch(block):
        return "picture", picture.groupdict()
    lines = block.split("\n")
    if block.startswith("| "):
        cells = [re.split(r" ?(?<!\\)\| ?", line)[1:-1] for line in lines]
        header, aligned, *rows = [[cell.replace("\\|", "|") for cell in row] for row in cells]
        is_left = [cell == ":--" for cell in aligned]
        columns = zip(is_left, *rows, strict=True)
        widths = [max([14 * left, *map(len, cells)]) for left, *cells in columns]
        is_wide = sum(widths) + 3 * len(widths) > COLUMN_CHARACTERS
        return "table", {"header": header, "is_left": is_left, "rows": rows, "is_wide": is_wide}
    lines = [line.replace("\\|", "|") for line in lines]
    if block.startswith("- "):
        return "list", [line.removeprefix("- ") for line in lines]
    return "text", "\n".join(lines)


def rich(text: str) -> Markup:
    """Escape a text for HTML, and replace Markdown marks and links by HTML elements."""
    words = str(escape(text))
    for pattern, tag in MARKS:
        words = re.sub(pattern, rf"<{tag}>\1</{tag}>", words)
    return Markup(re.sub(LINK, r'<a href="\2">\1</a>', words))


def environment(**options: Any) -> Environment:
    """Return a Jinja environment with the templates of reports; those of HTML escape all texts."""
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=select_autoescape(["html"]),
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
    filters = (
        ci_text,
        metric,
        number,
        share,
        staleness_in_words,
        median,
        table,
        aligned,
        after_name,
        in_words,
        rich,
    )
    templates.filters |= {function.__name__: function for function in filters}
    return templates


def render(template: str, **data: Any) -> str:
    """Render a Markdown template, and join the lines of each paragraph."""
    # The Markdown has no HTML escapes, because `page.html` escapes the texts later.
    markdown = environment(finalize=plain).get_template(template)
    text = markdown.render(METRIC_NAMES=METRIC_NAMES, row=row, **data)
    text = re.sub(r"(?<=[^\n])\n *(?=[^\s|#!-])", " ", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


class Markdown(str):
    """Text that is already Markdown; `plain` escapes all other values in a template."""


def plain(value: Any) -> str:
    """Return a value as one line with escaped column separators; Markdown stays unchanged."""
    if isinstance(value, Markdown):
        return value
    return re.sub(r"(?<!\\)\|", r"\|", re.sub(r"\s+", " ", str(value)))


def row(*cells: Any, left: int | None = None) -> Markdown:
    """Return a table row; a list in `cells` becomes several cells.

    If `left` is given, the row is a header whose first `left` columns are aligned left.
    """
    texts = [plain(c) for cell in cells for c in ([cell] if isinstance(cell, str | int) else cell)]
    aligned = [":--" if i < (left or 0) else "--:" for i in range(len(texts))]
    lines = [texts] if left is None else [texts, aligned]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))


def table(rows: Sequence[Sequence[str]]) -> Markdown:
    """Return a table as Markdown; the first of `rows` is the header."""
    return Markdown("\n".join([row(rows[0], left=1), *map(row, rows[1:])]))


def main(arguments: Sequence[str]) -> int:
    """Run `report FOLDER ...`; raises UserError for a mistake of the user."""
    parser = Parser(prog=command("report"), description=__doc__, allow_abbrev=False)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of runs")
    parser.add_argument("--output", type=Path, help="folder for the comparison of several runs")
    options = parser.parse_args(arguments)
    first, *others = options.folders
    output = options.output or first
    runs = comparison.runs_in(options.folders)
    if not others and runs in ([first], []):
        if options.output is not None:
            raise UserError("report: --output is for comparisons; a run's folder has its report")
        with reading(first):
            write_report(first)
        print(first / "report.md")
        return 0
    if others and options.output is None:
        raise UserError("report: got several runs; say where the comparison goes: --output FOLDER")
    with reading(*runs):
        write_comparison(runs, output)
    print(output / "comparison.md")
    return 0
