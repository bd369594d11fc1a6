"""Where keys and values lie: which page belongs to whom (`prefix`), and the pages themselves."""
