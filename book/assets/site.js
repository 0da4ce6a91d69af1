// Loaded on every page by name; see _config.yml.
// The theme puts its title, search and list of pages into a plain div; a landmark lets screen readers jump there.
document.addEventListener("DOMContentLoaded", () => {
  const sidebar = document.getElementById("pst-primary-sidebar");
  if (sidebar && !sidebar.hasAttribute("role")) {
    sidebar.setAttribute("role", "complementary");
    sidebar.setAttribute("aria-label", "Course");
  }
});
