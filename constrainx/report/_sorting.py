"""Sorts a table by the column whose heading is clicked, in the page itself."""

# Cells are compared as numbers where both are; what is not a number comes last either way.
SORT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const read = (row, i) => row.cells[i].textContent.trim();
  const duration = { s: 1, min: 60, h: 3600 };
  const number = (text) => {
    const parts = [...text.matchAll(/([\\d.]+) (h|min|s)\\b/g)];
    if (parts.length) return parts.reduce((sum, p) => sum + p[1] * duration[p[2]], 0);
    return text === "" ? NaN : Number(text);
  };
  heads.forEach((head, i) => {
    head.tabIndex = 0;
    const sort = () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => {
        const [x, y] = [read(a, i), read(b, i)];
        const [p, q] = [number(x), number(y)];
        if (isNaN(p) || isNaN(q)) {
          if (isNaN(p) && isNaN(q)) return (up ? 1 : -1) * x.localeCompare(y);
          return isNaN(p) ? 1 : -1;
        }
        return (up ? 1 : -1) * (p - q);
      });
      table.tBodies[0].append(...rows);
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
}
"""
