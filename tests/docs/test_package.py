"""What a maintainer would upload: metadata, links, versions, extras, the image and the workflow agree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import flatout

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import make_release  # noqa: E402  (the repository's own script, in no package)

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]
DISTRIBUTIONS = [".", "migrate", "migrate/names"]
SOURCE = PYPROJECT["project"]["urls"]["Source"]
# for work on flatout itself, which install.md does not offer, and for GPUs, which it names first
NOT_OFFERED = {"dev", "docs", "browser", "gpu"}
# does not admit the pinned Pillow
NOT_PINNED = {"trackio"}
LINK = re.compile(r"\]\(([^)\s]+)\)")


def pages() -> Iterator[Path]:
    """All pages that a person reads."""
    yield from (
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "migrate/README.md", "migrate/names/README.md")
    )
    yield from (ROOT / "docs").rglob("*.md")
    yield from (ROOT / "notebooks").glob("*.ipynb")


@pytest.fixture(scope="module", params=DISTRIBUTIONS)
def metadata(request: pytest.FixtureRequest) -> Any:
    """The metadata that a build writes for one of the distributions."""
    # what builds is installed by `make setup`, and not on every machine with GPUs
    core, manager = pytest.importorskip("hatchling.metadata.core"), pytest.importorskip("hatchling.plugin.manager")
    return core.ProjectMetadata(str(ROOT / request.param), manager.PluginManager())


def test_the_metadata_is_complete(metadata):
    core = metadata.core
    assert core.authors == [{"name": "flatout contributors"}]
    assert core.urls.keys() == {"Homepage", "Documentation", "Source", "Changelog", "Issues"}
    assert all(url.startswith(SOURCE) for url in core.urls.values())
    assert core.description
    assert core.keywords
    assert set(core.classifiers) <= set(import_module("trove_classifiers").classifiers)
    assert not [one for one in core.classifiers if one.startswith("License ::")]  # the expression says it
    assert core.license_expression == "Apache-2.0"
    assert core.license_files == ["LICENSE"]
    assert (Path(metadata.root) / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    for line in (one for one in core.classifiers if re.search(r"Python :: 3\.\d", one)):
        assert SpecifierSet(core.requires_python).contains(line.rpartition(" ")[2])


def test_all_distributions_have_the_version_of_the_package(metadata):
    assert metadata.version == flatout.__version__
    needs = [Requirement(text) for text in metadata.core.dependencies]
    assert all(one.specifier.contains(flatout.__version__) for one in needs if one.name.startswith("flatout"))


def test_on_an_index_every_link_of_the_readme_leads_to_a_file_of_the_tag(metadata):
    text = metadata.core.readme
    assert metadata.core.readme_content_type == "text/markdown"
    raw = SOURCE.replace("://github.com/", "://raw.githubusercontent.com/")
    files = re.compile(rf"{SOURCE}/(?:blob|tree)/(?:v{flatout.__version__}|main)/|{raw}/v{flatout.__version__}/")
    links = LINK.findall(text)
    assert links
    for link in links:
        assert link.startswith("https://"), link
        if found := files.match(link):
            assert (ROOT / link[found.end() :].partition("#")[0]).exists(), link
        else:
            assert not link.startswith((SOURCE, raw)), link


def test_the_address_of_the_project_is_the_one_of_pyproject():
    texts = {
        path: path.read_text() for path in (*pages(), *(ROOT / folder / "pyproject.toml" for folder in DISTRIBUTIONS))
    }
    pattern = re.compile(r"https://(?:github\.com|raw\.githubusercontent\.com)/([\w-]+/flatout)\b")
    found = {name for text in texts.values() for name in pattern.findall(text)}
    assert found == {SOURCE.removeprefix("https://github.com/")}


def test_the_changelog_has_this_version():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == "Unreleased"
    assert flatout.__version__ in headings or "dev" in flatout.__version__
    for page in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        assert f"version {flatout.__version__}" in page.read_text()


def test_every_extra_that_a_page_or_the_image_names_exists():
    texts = [page.read_text() for page in (*pages(), ROOT / "Dockerfile")]
    listed = re.compile(r"(?:\.|migrate|flatout|\$\{wheel\})\[([\w,]+)")
    named = {extra for text in texts for names in listed.findall(text) for extra in names.split(",") if extra}
    named |= {extra for text in texts for extra in re.findall(r"\bextra `(\w+)`", text)}
    assert {"gpu", "studio", "images"} <= named
    assert named <= EXTRAS.keys()
    table = (ROOT / "docs" / "install.md").read_text().partition("| extra | adds |")[2].partition("\n\n")[0]
    offered = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert offered == EXTRAS.keys() - NOT_OFFERED


def test_what_every_extra_needs_is_pinned_to_a_version_that_it_admits():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {
        canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines) if version
    }
    pinned = [needs for extra, needs in EXTRAS.items() if extra not in NOT_PINNED]
    for needs in (*pinned, PYPROJECT["project"]["dependencies"], PYPROJECT["build-system"]["requires"]):
        for one in map(Requirement, needs):
            assert one.specifier.contains(pins[canonicalize_name(one.name)]), one


def test_the_image_has_what_its_page_says():
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    stages = re.findall(r"^FROM (\S+) AS (\w+)$", text, re.M)
    names = [name for _, name in stages]
    for base, _ in stages:
        assert base in names or re.fullmatch(r"python:3\.\d+-slim-\w+", base), base
    admitted = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.M):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source in admitted, source
    extras = re.search(r"^ARG EXTRAS=(\S+)$", text, re.M)
    assert extras is not None
    assert set(extras[1].split(",")) == EXTRAS.keys() - NOT_OFFERED - NOT_PINNED - {"deepspeed"}
    for stage in re.split(r"^FROM ", text, flags=re.M)[-2:]:
        assert "USER 1000\n" in stage
        installs = re.findall(r"pip install[^;]+", stage)
        assert installs
        assert all("-c /constraints.txt" in one for one in installs)
    assert {"gpu", "cpu"} == set(names[-2:])
    page = (ROOT / "docs" / "install.md").read_text()
    assert {"gpu"} == set(re.findall(r"docker build .*--target (\w+)", page))
    assert re.search(r"^docker run .* flatout demo$", page, re.M)


def test_the_workflow_runs_targets_that_make_has_and_may_only_read():
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert flow["permissions"] == {"contents": "read"}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    steps = [step for job in flow["jobs"].values() for step in job["steps"]]
    assert all("permissions" not in job for job in flow["jobs"].values())
    runs = {step["run"] for step in steps if "run" in step}
    assert {"make check", "make suite", "make release", "make docs"} <= runs
    assert {run.removeprefix("make ") for run in runs} <= targets
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_release_is_a_commit_whose_changelog_has_its_version(tmp_path, monkeypatch):
    def git(*words: str) -> None:
        who = ("-c", "user.name=A", "-c", "user.email=a@b.c")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(make_release, "ROOT", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [1.2.0] - 2026-01-31\n")
    assert "no git clone" in str(make_release.problem_of("1.2.0"))
    git("init")
    assert "CHANGELOG.md" in str(make_release.problem_of("1.2.0"))
    git("add", ".")
    git("commit", "-m", "x")
    assert make_release.problem_of("1.2.0") is None
    assert make_release.problem_of("1.3.0.dev0") is None
    assert "[1.3.0]" in str(make_release.problem_of("1.3.0"))
