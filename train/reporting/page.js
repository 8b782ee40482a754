"use strict";
// Shows the rows of the configuration and the environment that hold every word that was typed.
const field = document.getElementById("search");
const changed = document.getElementById("changed");
const rows = [...document.querySelectorAll(".settings tbody tr")];
function search() {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    const wanted = !changed.checked || row.classList.contains("changed");
    row.hidden = !wanted || !words.every((word) => text.includes(word));
    shown += !row.hidden;
  }
  document.getElementById("found").textContent = `${shown} of ${rows.length} shown`;
}
if (field) {
  document.querySelector(".search").hidden = false;
  field.addEventListener("input", search);
  changed.addEventListener("change", search);
  search();
}
