const groups = [...document.querySelectorAll(".group")];
const [step, env, mixed, count] = ["f-step", "f-env", "f-mixed", "f-count"].map((id) => document.getElementById(id));
function show() {
  let shown = 0;
  for (const g of groups) {
    const match = (!step.value || g.dataset.step === step.value) && (!env.value || g.dataset.env === env.value)
      && (!mixed.checked || g.dataset.mixed === "1");
    g.hidden = !match;
    shown += match;
  }
  count.textContent = `${shown} of ${groups.length} groups`;
}
for (const control of [step, env, mixed]) control.addEventListener("change", show);
show();
