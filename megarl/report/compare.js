// Follow one run through all charts and the table.
for (const node of document.querySelectorAll("[data-run]")) {
  const mark = (on) => {
    document.body.classList.toggle("any-hot", on);
    for (const other of document.querySelectorAll("[data-run]")) {
      if (other.dataset.run === node.dataset.run) other.classList.toggle("hot", on);
    }
  };
  node.addEventListener("mouseenter", () => mark(true));
  node.addEventListener("mouseleave", () => mark(false));
}
