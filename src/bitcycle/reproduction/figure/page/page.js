"use strict";
// Sorting and filtering of the table of claims. Without scripts the whole table is there in the order of the papers.
(() => {
  const table = document.querySelector("#claims table"), form = document.querySelector("#filter");
  if (!table || !form) return;
  const body = table.tBodies[0], rows = [...body.rows], count = document.querySelector("#count");
  form.hidden = false;

  function show() {
    const wanted = Object.fromEntries(new FormData(form)), words = wanted.text.trim().toLowerCase().split(/\s+/);
    let shown = 0;
    for (const row of rows) {
      const fits = ["paper", "verdict", "published_size", "scope"].every(name => !wanted[name] || row.dataset[name] === wanted[name]);
      const text = row.textContent.toLowerCase();
      row.hidden = !(fits && words.every(word => text.includes(word)));
      shown += !row.hidden;
    }
    count.textContent = `${shown} of ${rows.length} rows`;
  }

  function sort(head) {
    const up = head.getAttribute("aria-sort") !== "ascending", column = head.cellIndex;
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = row => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
    rows.sort((a, b) => {
      const one = value(a), other = value(b);
      if (!one || !other) return !one - !other;  // nothing comes last in both directions
      const order = isNaN(one) || isNaN(other) ? one.localeCompare(other) : one - other;
      return up ? order : -order;
    });
    body.append(...rows);
  }

  for (const head of table.tHead.rows[0].cells) head.querySelector("button")?.addEventListener("click", () => sort(head));
  form.addEventListener("input", show);
  form.addEventListener("reset", () => setTimeout(show));
  form.addEventListener("submit", event => event.preventDefault());
  show();

  // a link into a folded table opens it
  const open = () => document.getElementById(decodeURIComponent(location.hash.slice(1)))?.closest("details")?.setAttribute("open", "");
  addEventListener("hashchange", open);
  open();
})();
