// A browser gives a page that was opened from disk no index to search in. The theme hides its field; this is the icon.
if (location.protocol === "file:") {
  for (const icon of document.querySelectorAll("label[for=__search]")) icon.style.display = "none";
}
