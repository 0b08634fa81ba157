// Before the first paint: the theme that was chosen here, or the system's.
document.documentElement.dataset.theme = localStorage.getItem("kukri.theme") ?? "system"
