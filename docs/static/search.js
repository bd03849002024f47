/* What pages for tasks say comes before what the reference says, and evidence comes last. */
const FIRST = {
  "quick-start": 9, "gpus": 16, "recipes/": 7, "guides/when-it-fails": 16, "guides/which-batch-norm": 8,
  "guides/uneven-data": 6, "originals/index": 6, "guides/": 5, "speed": 5, "faq": 4, "limits": 3,
  "index": 3,
};
const LAST = /^originals\/(?!index)/;
var Scorer = {
  score: ([page, , , , score]) =>
    LAST.test(page) ? score - 5
      : score + (Object.entries(FIRST).find(([name]) => page.startsWith(name))?.[1] ?? 0),
  // Sphinx's own values.
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
