"use strict";
// Tables: a click on a heading sorts by it, a second one the other way.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const heading = button.parentElement;
    const body = heading.closest("table").tBodies[0];
    const numbers = heading.classList.contains("n");
    const down = heading.getAttribute("aria-sort") === (numbers ? null : "ascending") ||
      heading.getAttribute("aria-sort") === "ascending";
    for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => {
      const cell = row.cells[heading.cellIndex];
      return numbers ? Number(cell.dataset.value) : cell.textContent;
    };
    const order = (one, other) =>
      numbers ? key(one) - key(other) : key(one).localeCompare(key(other));
    const rows = [...body.rows].sort((one, other) => (down ? -1 : 1) * order(one, other));
    body.append(...rows);
  });
}
// Charts: what lies nearest to the pointer is told.
const tip = document.getElementById("tip");
for (const svg of document.querySelectorAll("figure svg")) {
  const series = [...svg.querySelectorAll("path[data-points]")].map((path) => {
    const dot = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    dot.setAttribute("r", 5);
    dot.setAttribute("class", "dot " + path.getAttribute("class").split(" ")[1]);
    dot.setAttribute("visibility", "hidden");
    svg.append(dot);
    return { points: JSON.parse(path.dataset.points), name: path.dataset.name, dot };
  });
  const hide = () => {
    tip.hidden = true;
    for (const { dot } of series) dot.setAttribute("visibility", "hidden");
  };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const lines = [];
    for (const { points, name, dot } of series) {
      // Points are in order: the last one at or before the pointer, or the first.
      let at = points.findIndex((point) => point[0] > x);
      at = at < 0 ? points.length - 1 : Math.max(at - 1, 0);
      const point = points[at];
      if (!point) continue;
      dot.setAttribute("cx", point[0]);
      dot.setAttribute("cy", point[1]);
      dot.setAttribute("visibility", "visible");
      lines.push(series.length > 1 ? name + ": " + point[2] : point[2]);
    }
    tip.textContent = lines.join("\n");
    tip.hidden = lines.length === 0;
    const left = Math.min(event.pageX + 14, document.documentElement.clientWidth - tip.offsetWidth - 8);
    tip.style.left = Math.max(left, 8) + "px";
    tip.style.top = event.pageY + 14 + "px";
  });
}
