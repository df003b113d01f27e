// Shows the completions that the form above them asks for: by step, words of the prompt or answer, reward.
const form = document.querySelector(".filter");
if (form) {
  const rows = [...document.querySelectorAll("#completions tbody tr")];
  const said = form.querySelector("output");
  const filter = () => {
    const asked = new FormData(form), words = asked.get("words").toLowerCase();
    const within = (value, name) =>
      (asked.get(`${name}-from`) === "" || value >= Number(asked.get(`${name}-from`))) &&
      (asked.get(`${name}-to`) === "" || value <= Number(asked.get(`${name}-to`)));
    let shown = 0;
    for (const row of rows) {
      const matches = within(Number(row.dataset.step), "step") && within(Number(row.dataset.reward), "reward");
      row.hidden = !(matches && row.textContent.toLowerCase().includes(words));
      shown += row.hidden ? 0 : 1;
    }
    said.textContent = `${shown} of ${rows.length}`;
  };
  form.hidden = false;
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  filter();
}
