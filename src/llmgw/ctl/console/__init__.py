"""``ctl console``: the cluster on one screen. Views are pure; only ``terminal`` knows curses."""
