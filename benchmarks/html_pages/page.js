// Sorting and searching of tables, and hints for marks. The page is whole without it.
"use strict";

function sortable(holder) {
  const table = holder.querySelector("table"), body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells], rows = [...body.rows];
  const value = (row, i) => {
    const { dataset, textContent } = row.cells[i];
    const text = dataset.v ?? textContent.replaceAll(",", "");
    return /^-?[\d.]+$/.test(text) ? Number(text) : textContent;
  };
  heads.forEach((head, i) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const numbers = rows.some((row) => typeof value(row, i) === "number");
      const now = head.getAttribute("aria-sort");
      const up = now ? now === "descending" : !numbers;   // the largest numbers first
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const order = (a, b) => {
        const x = value(a, i), y = value(b, i);
        if (x === "" || y === "") return (x === "") - (y === "");   // what is empty comes last
        if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
        const sign = typeof x === "number" ? x - y : x.localeCompare(y, "en", { numeric: true });
        return up ? sign : -sign;
      };
      body.append(...rows.toSorted(order));
    });
  });
  if (rows.length < 6) return;
  const search = document.createElement("p"), label = document.createElement("label");
  const input = document.createElement("input"), count = document.createElement("output");
  search.className = "search";
  input.type = "search";
  input.placeholder = "any words, in any order";
  label.append("Search ", input);
  search.append(label, count);
  holder.prepend(search);
  const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
  const filter = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) row.hidden = !words.every((word) => texts.get(row).includes(word));
    const left = rows.filter((row) => !row.hidden).length;
    count.value = left === rows.length ? `${left} rows` : `${left} of ${rows.length} rows`;
  };
  input.setAttribute("aria-label", `Search the table ${holder.dataset.name}`);
  input.addEventListener("input", filter);
  filter();
}

function hints() {
  const box = document.createElement("div");
  box.id = "hint";
  box.hidden = true;
  document.body.append(box);
  for (const title of document.querySelectorAll("svg title")) {
    title.parentElement.dataset.hint = title.textContent;
    title.remove();
  }
  document.addEventListener("pointerover", (event) => {
    const mark = event.target.closest?.("[data-hint]");
    box.hidden = !mark;
    if (!mark) return;
    box.textContent = mark.dataset.hint;
    box.style.left = "0";   // so that its width does not depend on where it was
    const place = mark.getBoundingClientRect(), size = box.getBoundingClientRect();
    const most = document.documentElement.clientWidth - size.width - 8;
    const left = Math.max(8, Math.min(place.left + place.width / 2 - size.width / 2, most));
    const above = place.top - size.height - 8;
    box.style.left = `${left + scrollX}px`;
    box.style.top = `${(above > 4 ? above : place.bottom + 8) + scrollY}px`;
  });
}

document.querySelectorAll(".sortable").forEach(sortable);
hints();
