/* What a keyboard or a screen reader needs and only a browser knows. */
(function () {
  function reach() {
    // on a phone a wide figure scrolls in its own box: shrunk, its labels could not be read
    for (const image of document.querySelectorAll("article .cell_output img")) {
      const least = innerWidth < 600 ? Math.round(0.65 * image.naturalWidth) + "px" : "";
      image.style.minWidth = image.style.maxWidth = least;
    }
    // what scrolls sideways can be scrolled with the keyboard; what fits costs no tab stop
    for (const box of document.querySelectorAll("article .table-scroll, article pre, article .math, article .pst-scrollable-table-container, article .cell_output .output, article .cell_output figure")) {
      const wide = box.scrollWidth > box.clientWidth;
      box.classList.toggle("scrolls", wide); // says so on a phone, where no bar is seen
      if (wide) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
  }
  function name() {
    // the theme's toggles in the list of pages hold an icon and no words
    for (const toggle of document.querySelectorAll("nav summary:not([aria-label])")) {
      const page = toggle.closest("li").querySelector("a");
      toggle.setAttribute("aria-label", "Pages below " + (page ? page.textContent.trim() : ""));
    }
  }
  function correct() {
    // a fold is named by the words that it shows; a corner of a table without a word is no header
    for (const fold of document.querySelectorAll("article summary[aria-label='Toggle hidden content']")) {
      fold.removeAttribute("aria-label");
    }
    for (const head of document.querySelectorAll("article th")) {
      if (!head.textContent.trim()) head.setAttribute("role", "presentation");
    }
  }
  addEventListener("DOMContentLoaded", function () { name(); correct(); reach(); });
  addEventListener("load", reach);
  addEventListener("resize", reach);
}());
