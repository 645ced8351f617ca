/* The list of claims: filter, search, sort. Without this script the whole list stands as it is. */
(() => {
  "use strict";

  const start = () => {
    const table = document.querySelector("table.claim-list");
    const form = document.getElementById("claim-filter");
    if (!table || !form) return;
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const count = document.getElementById("claim-count");
    const words = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
    const names = ["paper", "chapter", "status", "data"];

    const matches = (row) =>
      names.every((name) => {
        const wanted = form.elements[name].value;
        return !wanted || row.dataset[name].split("|").includes(wanted);
      }) &&
      form.elements.words.value
        .toLowerCase()
        .split(/\s+/)
        .every((word) => words.get(row).includes(word));

    const filter = () => {
      rows.forEach((row) => { row.hidden = !matches(row); });
      const shown = rows.filter((row) => !row.hidden).length;
      count.textContent = `${shown} of ${rows.length} claims`;
    };

    const sort = (header, column) => {
      const up = header.getAttribute("aria-sort") !== "ascending";
      [...table.tHead.rows[0].cells].forEach((cell) => cell.removeAttribute("aria-sort"));
      header.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.key;
      const compare = header.dataset.sort === "number"
        ? (a, b) => Number(key(a)) - Number(key(b))
        : (a, b) => key(a).localeCompare(key(b), "en", { numeric: true });
      const sorted = [...rows].sort((a, b) => (up ? 1 : -1) * compare(a, b));
      body.append(...sorted);
    };

    [...table.tHead.rows[0].cells].forEach((header, column) => {
      if (header.dataset.sort === "none") return;
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = header.textContent;
      button.addEventListener("click", () => sort(header, column));
      header.replaceChildren(button);
    });

    // a link to a claim that the filter hides shows it
    const follow = () => {
      const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
      if (target && target.hidden) {
        form.reset();
        filter();
        target.scrollIntoView();
      }
    };

    new URLSearchParams(location.search).forEach((value, name) => {
      if (names.includes(name)) form.elements[name].value = value;
    });
    form.hidden = false;
    form.addEventListener("input", filter);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(filter));
    window.addEventListener("hashchange", follow);
    filter();
    follow();
  };

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
