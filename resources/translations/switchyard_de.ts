<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE TS>
<TS version="2.1" language="de" sourcelanguage="en">
    <context>
        <name>AboutCard</name>
        <message>
            <source>About</source>
            <translation>Über</translation>
        </message>
        <message>
            <source>Licences</source>
            <translation>Lizenzen</translation>
        </message>
        <message>
            <source>Open logs</source>
            <translation>Protokolle öffnen</translation>
        </message>
        <message>
            <source>Switchyard {0}</source>
            <translation>Switchyard {0}</translation>
        </message>
        <message>
            <source>Python {0}, Qt {1}</source>
            <translation>Python {0}, Qt {1}</translation>
        </message>
        <message>
            <source>Logs</source>
            <translation>Protokolle</translation>
        </message>
        <message>
            <source>Contain no prompts and no answers: {0}</source>
            <translation>Enthalten weder Prompts noch Antworten: {0}</translation>
        </message>
        <message>
            <source>Save report…</source>
            <translation>Bericht speichern…</translation>
        </message>
        <message>
            <source>Report</source>
            <translation>Bericht</translation>
        </message>
        <message>
            <source>One file to attach to a bug report: versions, hardware, findings and the end of the logs. </source>
            <translation>Eine Datei als Anhang für eine Fehlermeldung: Versionen, Hardware, was gefunden wurde, das Ende der Protokolle. </translation>
        </message>
        <message>
            <source>No prompts, no names; nothing is sent.</source>
            <translation>Keine Prompts, keine Namen; nichts wird gesendet.</translation>
        </message>
        <message>
            <source>Looking at this PC…</source>
            <translation>Dieser PC wird untersucht…</translation>
        </message>
        <message>
            <source>It is in {0}: read it before you pass it on.</source>
            <translation>Er liegt in {0}: Lesen Sie ihn, bevor Sie ihn weitergeben.</translation>
        </message>
    </context>
    <context>
        <name>AnswerCard</name>
        <message>
            <source>Answers</source>
            <translation>Antworten</translation>
        </message>
        <message>
            <source>More sampling…</source>
            <translation>Weiteres Sampling…</translation>
        </message>
        <message>
            <source>Max</source>
            <translation>Max.</translation>
        </message>
        <message>
            <source>tokens</source>
            <translation>Token</translation>
        </message>
        <message>
            <source>Temperature</source>
            <translation>Temperatur</translation>
        </message>
        <message>
            <source>Max tokens per answer</source>
            <translation>Max. Token pro Antwort</translation>
        </message>
        <message>
            <source>Answer must be</source>
            <translation>Form der Antwort</translation>
        </message>
        <message>
            <source>Text</source>
            <translation>Text</translation>
        </message>
        <message>
            <source>One of choices</source>
            <translation>Eine von mehreren Optionen</translation>
        </message>
        <message>
            <source>JSON with a schema</source>
            <translation>JSON nach Schema</translation>
        </message>
        <message>
            <source>Choices</source>
            <translation>Optionen</translation>
        </message>
        <message>
            <source>One choice per line, such as
positive
negative</source>
            <translation>Eine Option pro Zeile, zum Beispiel
positiv
negativ</translation>
        </message>
        <message>
            <source>JSON schema</source>
            <translation>JSON-Schema</translation>
        </message>
        <message>
            <source>Enter at least two choices, one per line.</source>
            <translation>Geben Sie mindestens zwei Optionen ein, eine pro Zeile.</translation>
        </message>
        <message>
            <source>Enter the JSON schema that answers must follow.</source>
            <translation>Geben Sie das JSON-Schema ein, dem die Antworten folgen müssen.</translation>
        </message>
        <message>
            <source>The schema is not a JSON object.</source>
            <translation>Das Schema ist kein JSON-Objekt.</translation>
        </message>
        <message>
            <source>The schema is not JSON: {0}.</source>
            <translation>Das Schema ist kein gültiges JSON: {0}.</translation>
        </message>
        <message>
            <source>Default answer settings</source>
            <translation>Standardeinstellungen für Antworten</translation>
        </message>
    </context>
    <context>
        <name>AnswerMessage</name>
        <message>
            <source>Copy the answer</source>
            <translation>Antwort kopieren</translation>
        </message>
        <message>
            <source>Answer again</source>
            <translation>Neu antworten</translation>
        </message>
        <message>
            <source>Continue in a new chat</source>
            <translation>In neuem Chat fortfahren</translation>
        </message>
        <message>
            <source>Edit the answer</source>
            <translation>Antwort bearbeiten</translation>
        </message>
        <message>
            <source>Delete the answer</source>
            <translation>Antwort löschen</translation>
        </message>
        <message>
            <source>Continue</source>
            <translation>Fortsetzen</translation>
        </message>
        <message>
            <source>Restart engine</source>
            <translation>Engine neu starten</translation>
        </message>
        <message>
            <source>Fold earlier turns</source>
            <translation>Frühere Nachrichten zusammenfassen</translation>
        </message>
        <message>
            <source>The model summarises them, and reads the summary instead.</source>
            <translation>Das Modell fasst sie zusammen und liest stattdessen die Zusammenfassung.</translation>
        </message>
        <message>
            <source>Leave out the oldest</source>
            <translation>Die ältesten weglassen</translation>
        </message>
        <message>
            <source>The engine is not running. Restart it to get your answer.</source>
            <translation>Die Engine läuft nicht. Starten Sie sie neu, um Ihre Antwort zu erhalten.</translation>
        </message>
        <message>
            <source>folded, not sent</source>
            <translation>zusammengefasst, nicht gesendet</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>Kopiert</translation>
        </message>
    </context>
    <context>
        <name>AnswerView</name>
        <message>
            <source>Answer</source>
            <translation>Antwort</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>Kopieren</translation>
        </message>
        <message>
            <source>Copy link</source>
            <translation>Link kopieren</translation>
        </message>
        <message>
            <source>Select all</source>
            <translation>Alles auswählen</translation>
        </message>
        <message>
            <source>Copy all as plain text</source>
            <translation>Alles als reinen Text kopieren</translation>
        </message>
        <message>
            <source>Copy all as Markdown</source>
            <translation>Alles als Markdown kopieren</translation>
        </message>
    </context>
    <context>
        <name>ApiServer</name>
        <message>
            <source>Port {0} is in use by another program, or not allowed. Choose another one.</source>
            <translation>Port {0} wird von einem anderen Programm verwendet oder ist nicht erlaubt. Wählen Sie einen anderen.</translation>
        </message>
        <message>
            <source>The server stopped unexpectedly. Turn it off and on again.</source>
            <translation>Der Server wurde unerwartet beendet. Schalten Sie ihn aus und wieder ein.</translation>
        </message>
        <message>
            <source>The server could not be started. Reinstall Switchyard.</source>
            <translation>Der Server konnte nicht gestartet werden. Installieren Sie Switchyard neu.</translation>
        </message>
    </context>
    <context>
        <name>Asking</name>
        <message>
            <source>Cancel</source>
            <translation>Abbrechen</translation>
        </message>
        <message>
            <source>A batch job is running.</source>
            <translation>Ein Stapelauftrag läuft.</translation>
        </message>
        <message>
            <source>Loading a model pauses it. No answered row is lost: you can resume it later, with the same model and precision.</source>
            <translation>Wenn ein Modell geladen wird, pausiert er. Keine beantwortete Zeile geht verloren: Sie können ihn später mit demselben Modell und derselben Genauigkeit fortsetzen.</translation>
        </message>
        <message>
            <source>Pause the job</source>
            <translation>Auftrag pausieren</translation>
        </message>
        <message numerus="yes">
            <source>{0} batch jobs are running.</source>
            <translation>
                <numerusform>{0} Stapelauftrag läuft.</numerusform>
                <numerusform>{0} Stapelaufträge laufen.</numerusform>
            </translation>
        </message>
        <message>
            <source>Loading a model pauses them. No answered row is lost: you can resume them later, with the same model and precision.</source>
            <translation>Wenn ein Modell geladen wird, pausieren sie. Keine beantwortete Zeile geht verloren: Sie können sie später mit demselben Modell und derselben Genauigkeit fortsetzen.</translation>
        </message>
        <message>
            <source>Pause the jobs</source>
            <translation>Aufträge pausieren</translation>
        </message>
    </context>
    <context>
        <name>Attaching</name>
        <message>
            <source>A message takes up to {0} documents: attach the folder that they are in.</source>
            <translation>Eine Nachricht fasst bis zu {0} Dokumente: Hängen Sie den Ordner an, in dem sie liegen.</translation>
        </message>
    </context>
    <context>
        <name>AttachmentChip</name>
        <message>
            <source>Remove {0}</source>
            <translation>{0} entfernen</translation>
        </message>
    </context>
    <context>
        <name>Batch</name>
        <message>
            <source>Row {0}</source>
            <translation>Zeile {0}</translation>
        </message>
        <message>
            <source>{0} tokens</source>
            <translation>{0} Token</translation>
        </message>
        <message>
            <source>The row {0}.</source>
            <translation>Die Zeile: {0}.</translation>
        </message>
        <message>
            <source>(an empty answer)</source>
            <translation>(eine leere Antwort)</translation>
        </message>
        <message>
            <source>Files of prompts</source>
            <translation>Dateien mit Prompts</translation>
        </message>
        <message>
            <source>tomorrow {0}</source>
            <translation>morgen {0}</translation>
        </message>
        <message>
            <source>d MMM</source>
            <translation>d. MMM</translation>
        </message>
        <message>
            <source>d MMM yyyy</source>
            <translation>d. MMM yyyy</translation>
        </message>
        <message>
            <source>One row</source>
            <translation>Eine Zeile</translation>
        </message>
        <message>
            <source>{0} to {1} tokens/s</source>
            <translation>{0} bis {1} Token/s</translation>
        </message>
        <message>
            <source>done between {0} and {1}</source>
            <translation>fertig zwischen {0} und {1}</translation>
        </message>
        <message>
            <source>done at about {0}</source>
            <translation>fertig etwa {0}</translation>
        </message>
        <message>
            <source>Measured on the trial rows, ±{0}.</source>
            <translation>An den Probezeilen gemessen, ±{0}.</translation>
        </message>
        <message>
            <source>done by {0} even if every answer takes all {1} tokens</source>
            <translation>fertig bis {0}, selbst wenn jede Antwort alle {1} Token braucht</translation>
        </message>
        <message>
            <source>Predicted, ±{0}; a trial of the first rows is more exact.</source>
            <translation>Vorhergesagt, ±{0}; eine Probe der ersten Zeilen ist genauer.</translation>
        </message>
        <message>
            <source>One row at a time: {0} tokens/s.</source>
            <translation>Eine Zeile nach der anderen: {0} Token/s.</translation>
        </message>
        <message>
            <source>Context of these rows: up to {0} of memory.</source>
            <translation>Kontext dieser Zeilen: bis zu {0} Speicher.</translation>
        </message>
        <message>
            <source>Rows are answered one at a time</source>
            <translation>Zeilen werden einzeln beantwortet</translation>
        </message>
        <message>
            <source>{0} rows share each load of a layer's weights</source>
            <translation>{0} Zeilen teilen sich jedes Laden der Gewichte einer Schicht</translation>
        </message>
        <message>
            <source>Measured {2} tokens/s, slower than the {0} to {1} predicted: other programs may be busy, or rows longer than the first ones. The time left is based on the measured rate.</source>
            <translation>Gemessen: {2} Token/s, langsamer als die vorhergesagten {0} bis {1}: Vielleicht sind andere Programme beschäftigt, oder Zeilen sind länger als die ersten. Die Restzeit beruht auf der Messung.</translation>
        </message>
        <message>
            <source>Measured {2} tokens/s, faster than the {0} to {1} predicted. The time left is based on the measured rate.</source>
            <translation>Gemessen: {2} Token/s, schneller als die vorhergesagten {0} bis {1}. Die Restzeit beruht auf der Messung.</translation>
        </message>
        <message>
            <source>Expected: {0} to {1} tokens/s.</source>
            <translation>Erwartet: {0} bis {1} Token/s.</translation>
        </message>
        <message>
            <source>Limited by CPU compute.</source>
            <translation>Begrenzt durch die Rechenleistung der CPU.</translation>
        </message>
        <message>
            <source>Limited by reading weights from RAM.</source>
            <translation>Begrenzt durch das Lesen der Gewichte aus dem RAM.</translation>
        </message>
        <message>
            <source>Limited by attention on the CPU.</source>
            <translation>Begrenzt durch die Attention auf der CPU.</translation>
        </message>
        <message>
            <source>Limited by reading experts from disk.</source>
            <translation>Begrenzt durch das Lesen von Experten vom Datenträger.</translation>
        </message>
        <message>
            <source>Limited by the link to the card.</source>
            <translation>Begrenzt durch die Verbindung zur Grafikkarte.</translation>
        </message>
        <message>
            <source>Limited by GPU compute.</source>
            <translation>Begrenzt durch die Rechenleistung der GPU.</translation>
        </message>
        <message>
            <source>running</source>
            <translation>läuft</translation>
        </message>
        <message>
            <source>waiting</source>
            <translation>wartet</translation>
        </message>
        <message>
            <source>waiting, place {0}</source>
            <translation>wartet, Platz {0}</translation>
        </message>
        <message>
            <source>stopping</source>
            <translation>wird gestoppt</translation>
        </message>
        <message>
            <source>paused</source>
            <translation>pausiert</translation>
        </message>
        <message>
            <source>stopped</source>
            <translation>gestoppt</translation>
        </message>
        <message>
            <source>done</source>
            <translation>fertig</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>fehlgeschlagen</translation>
        </message>
        <message>
            <source>runs elsewhere</source>
            <translation>läuft anderswo</translation>
        </message>
        <message>
            <source>1 row done</source>
            <translation>1 Zeile fertig</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows done</source>
            <translation>
                <numerusform>{0} Zeile fertig</numerusform>
                <numerusform>{0} Zeilen fertig</numerusform>
            </translation>
        </message>
        <message numerus="yes">
            <source>{0} of {1} rows</source>
            <translation>
                <numerusform>{0} von {1} Zeile</numerusform>
                <numerusform>{0} von {1} Zeilen</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} failed</source>
            <translation>{0} fehlgeschlagen</translation>
        </message>
        <message>
            <source>{0} cut off</source>
            <translation>{0} abgeschnitten</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} Token/s</translation>
        </message>
        <message>
            <source>done by {0} at the latest</source>
            <translation>fertig spätestens {0}</translation>
        </message>
        <message>
            <source>Shares the engine with your chat until the answer is complete.</source>
            <translation>Teilt sich die Engine mit Ihrem Chat, bis die Antwort vollständig ist.</translation>
        </message>
        <message>
            <source>Reading the file…</source>
            <translation>Datei wird gelesen…</translation>
        </message>
        <message>
            <source>Starts when the engine is ready.</source>
            <translation>Beginnt, sobald die Engine bereit ist.</translation>
        </message>
        <message>
            <source>Starts when a job before it is done and a model is loaded.</source>
            <translation>Beginnt, sobald ein vorheriger Auftrag fertig und ein Modell geladen ist.</translation>
        </message>
        <message>
            <source>Saving finished rows…</source>
            <translation>Fertige Zeilen werden gespeichert…</translation>
        </message>
        <message>
            <source>Finishing the current layer and saving finished rows…</source>
            <translation>Die aktuelle Schicht wird abgeschlossen, fertige Zeilen werden gespeichert…</translation>
        </message>
        <message>
            <source>Another program is working on this job, such as “switchyard batch”.</source>
            <translation>Ein anderes Programm arbeitet an diesem Auftrag, etwa „switchyard batch“.</translation>
        </message>
        <message>
            <source>All rows are in {0}.</source>
            <translation>Alle Zeilen sind in {0}.</translation>
        </message>
        <message>
            <source>{0} says why rows failed.</source>
            <translation>{0} nennt die Gründe, warum Zeilen fehlgeschlagen sind.</translation>
        </message>
        <message>
            <source>Column “problem” says why rows failed.</source>
            <translation>Die Spalte „problem“ nennt die Gründe, warum Zeilen fehlgeschlagen sind.</translation>
        </message>
        <message>
            <source>Stopped: the answered rows are in {0}.</source>
            <translation>Gestoppt: Die beantworteten Zeilen sind in {0}.</translation>
        </message>
        <message>
            <source>Resume continues where it stopped.</source>
            <translation>„Fortsetzen“ macht dort weiter, wo der Auftrag anhielt.</translation>
        </message>
        <message>
            <source>{0} min {1} s</source>
            <translation>{0} min {1} s</translation>
        </message>
        <message>
            <source>{0} tokens in {1}, {2} tokens/s.</source>
            <translation>{0} Token in {1}, {2} Token/s.</translation>
        </message>
        <message>
            <source>{0} s</source>
            <translation>{0} s</translation>
        </message>
        <message>
            <source>Connecting to the Ray cluster…</source>
            <translation>Verbindung zum Ray-Cluster wird hergestellt…</translation>
        </message>
        <message>
            <source>Asking the servers which models they have…</source>
            <translation>Die Server werden nach ihren Modellen gefragt…</translation>
        </message>
        <message>
            <source>Rows are sent to {0}.</source>
            <translation>Zeilen werden an {0} gesendet.</translation>
        </message>
        <message>
            <source>Rows are sent to {0} on this PC; no text leaves it.</source>
            <translation>Zeilen werden an {0} auf diesem PC gesendet; kein Text verlässt ihn.</translation>
        </message>
        <message>
            <source> and to </source>
            <translation> und an </translation>
        </message>
        <message>
            <source>Chats go first on this PC.</source>
            <translation>Chats haben auf diesem PC Vorrang.</translation>
        </message>
        <message>
            <source>This PC answers your chat first.</source>
            <translation>Dieser PC beantwortet zuerst Ihren Chat.</translation>
        </message>
        <message>
            <source>The first rows are being answered.</source>
            <translation>Die ersten Zeilen werden beantwortet.</translation>
        </message>
        <message>
            <source>Another job shares the engine.</source>
            <translation>Ein weiterer Auftrag nutzt die Engine mit.</translation>
        </message>
        <message>
            <source>{0} other jobs share the engine.</source>
            <translation>{0} weitere Aufträge nutzen die Engine mit.</translation>
        </message>
        <message>
            <source>Chats go on beside it.</source>
            <translation>Chats laufen daneben weiter.</translation>
        </message>
        <message>
            <source>complete</source>
            <translation>vollständig</translation>
        </message>
        <message>
            <source>cut off</source>
            <translation>abgeschnitten</translation>
        </message>
        <message>
            <source>context full</source>
            <translation>Kontext voll</translation>
        </message>
        <message>
            <source>No text leaves this PC.</source>
            <translation>Kein Text verlässt diesen PC.</translation>
        </message>
        <message>
            <source>The rows are sent to a server on this PC; no text leaves it.</source>
            <translation>Die Zeilen werden an einen Server auf diesem PC gesendet; kein Text verlässt ihn.</translation>
        </message>
        <message>
            <source>The text of every row may be sent to {0}.</source>
            <translation>Der Text jeder Zeile kann an {0} gesendet werden.</translation>
        </message>
        <message>
            <source>that this PC belongs to</source>
            <translation>zu dem dieser PC gehört</translation>
        </message>
        <message>
            <source>at {0}</source>
            <translation>auf {0}</translation>
        </message>
        <message>
            <source>The text of every row is sent to the nodes of the Ray cluster {0}.</source>
            <translation>Der Text jeder Zeile wird an die Knoten des Ray-Clusters {0} gesendet.</translation>
        </message>
        <message>
            <source>This PC</source>
            <translation>Dieser PC</translation>
        </message>
        <message>
            <source>Not asked: {0}</source>
            <translation>Nicht gefragt: {0}</translation>
        </message>
        <message>
            <source>Paused, and asked again later: {0}</source>
            <translation>Pausiert und wird später wieder gefragt: {0}</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows at once</source>
            <translation>
                <numerusform>{0} Zeile zugleich</numerusform>
                <numerusform>{0} Zeilen zugleich</numerusform>
            </translation>
        </message>
        <message>
            <source>1 row at once</source>
            <translation>1 Zeile zugleich</translation>
        </message>
        <message numerus="yes">
            <source>Measured there on {0} rows: {1} s for a row, {2} tokens read and {3} written.</source>
            <translation>
                <numerusform>Dort an {0} Zeile gemessen: {1} s pro Zeile, {2} Token gelesen und {3} geschrieben.</numerusform>
                <numerusform>Dort an {0} Zeilen gemessen: {1} s pro Zeile, {2} Token gelesen und {3} geschrieben.</numerusform>
            </translation>
        </message>
        <message>
            <source>All rows take {0} min at most; asked at once, they take less.</source>
            <translation>Alle Zeilen dauern höchstens {0} min; gleichzeitig gefragt geht es schneller.</translation>
        </message>
        <message>
            <source>They cost about {0}.</source>
            <translation>Sie kosten etwa {0}.</translation>
        </message>
        <message>
            <source>{0} row took {1} s, at {2} tokens/s.</source>
            <translation>{0} Zeile dauerte {1} s, bei {2} Token/s.</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows took {1} s, at {2} tokens/s.</source>
            <translation>
                <numerusform>{0} Zeile dauerte {1} s, bei {2} Token/s.</numerusform>
                <numerusform>{0} Zeilen dauerten {1} s, bei {2} Token/s.</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>BatchHead</name>
        <message>
            <source>Batch</source>
            <translation>Stapel</translation>
        </message>
        <message>
            <source>Retry failed</source>
            <translation>Fehler wiederholen</translation>
        </message>
        <message>
            <source>Pause</source>
            <translation>Pausieren</translation>
        </message>
        <message>
            <source>Resume</source>
            <translation>Fortsetzen</translation>
        </message>
        <message>
            <source>Open result</source>
            <translation>Ergebnis öffnen</translation>
        </message>
        <message>
            <source>More</source>
            <translation>Mehr</translation>
        </message>
        <message>
            <source>New job</source>
            <translation>Neuer Auftrag</translation>
        </message>
        <message>
            <source>Show in folder</source>
            <translation>Im Ordner anzeigen</translation>
        </message>
        <message>
            <source>Stop and keep answers</source>
            <translation>Stoppen und Antworten behalten</translation>
        </message>
        <message>
            <source>Start over…</source>
            <translation>Von vorn beginnen…</translation>
        </message>
        <message>
            <source>Move up in queue</source>
            <translation>In der Warteschlange nach vorn</translation>
        </message>
        <message>
            <source>Move down in queue</source>
            <translation>In der Warteschlange nach hinten</translation>
        </message>
        <message>
            <source>Remove from list</source>
            <translation>Aus der Liste entfernen</translation>
        </message>
        <message>
            <source>From a file…</source>
            <translation>Aus einer Datei…</translation>
        </message>
        <message>
            <source>From a folder…</source>
            <translation>Aus einem Ordner…</translation>
        </message>
    </context>
    <context>
        <name>BatchHint</name>
        <message>
            <source>Show job</source>
            <translation>Auftrag anzeigen</translation>
        </message>
        <message>
            <source>The engine stopped, so the batch job is paused; no answered row is lost.</source>
            <translation>Die Engine wurde beendet, daher pausiert der Stapelauftrag; keine beantwortete Zeile ist verloren.</translation>
        </message>
        <message>
            <source>The batch job{0} shares the engine with your chat: both are slower until the answer is complete.</source>
            <translation>Der Stapelauftrag{0} teilt sich die Engine mit Ihrem Chat: Beide sind langsamer, bis die Antwort vollständig ist.</translation>
        </message>
        <message>
            <source>A batch job is running{0}. Your chats share the engine with it and come first.</source>
            <translation>Ein Stapelauftrag läuft{0}. Ihre Chats teilen sich die Engine mit ihm und haben Vorrang.</translation>
        </message>
    </context>
    <context>
        <name>BatchJobs</name>
        <message>
            <source>Switchyard was closed before the job started.</source>
            <translation>Switchyard wurde geschlossen, bevor der Auftrag begann.</translation>
        </message>
        <message>
            <source>Switchyard was closed while the job ran; no answered row is lost.</source>
            <translation>Switchyard wurde geschlossen, während der Auftrag lief; keine beantwortete Zeile ist verloren.</translation>
        </message>
        <message>
            <source>The engine was needed for something else, such as another model; no answered row is lost.</source>
            <translation>Die Engine wurde für etwas anderes gebraucht, etwa ein anderes Modell; keine beantwortete Zeile ist verloren.</translation>
        </message>
        <message>
            <source>The list of jobs could not be saved ({0}).</source>
            <translation>Die Liste der Aufträge konnte nicht gespeichert werden ({0}).</translation>
        </message>
    </context>
    <context>
        <name>BatchPage</name>
        <message>
            <source>Batch</source>
            <translation>Stapel</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>Schließen</translation>
        </message>
        <message>
            <source>Your chat's prompt is ready: choose the file whose rows it is to be asked of.</source>
            <translation>Der Prompt Ihres Chats ist bereit: Wählen Sie die Datei, für deren Zeilen er gelten soll.</translation>
        </message>
        <message>
            <source>{0} has an unsupported file type: use txt, md, csv, tsv, jsonl, parquet, xlsx, pdf, docx or html, or a folder of such files.</source>
            <translation>Der Dateityp von {0} wird nicht unterstützt: Verwenden Sie txt, md, csv, tsv, jsonl, parquet, xlsx, pdf, docx oder html oder einen Ordner mit solchen Dateien.</translation>
        </message>
        <message numerus="yes">
            <source>{0} more after this one</source>
            <translation>
                <numerusform>Danach noch {0} Datei</numerusform>
                <numerusform>Danach noch {0} Dateien</numerusform>
            </translation>
        </message>
        <message>
            <source>Another job is writing {0}: choose another result file.</source>
            <translation>Ein anderer Auftrag schreibt {0}: Wählen Sie eine andere Ergebnisdatei.</translation>
        </message>
        <message>
            <source>{0} already exists.</source>
            <translation>{0} ist bereits vorhanden.</translation>
        </message>
        <message>
            <source>Replacing it deletes the answers in it. To keep them, choose another name.</source>
            <translation>Beim Ersetzen gehen die Antworten darin verloren. Um sie zu behalten, wählen Sie einen anderen Namen.</translation>
        </message>
        <message>
            <source>Replace it</source>
            <translation>Ersetzen</translation>
        </message>
        <message>
            <source>Back</source>
            <translation>Zurück</translation>
        </message>
        <message>
            <source>Pause the job before you remove it from the list.</source>
            <translation>Pausieren Sie den Auftrag, bevor Sie ihn aus der Liste entfernen.</translation>
        </message>
        <message>
            <source>{0} was removed from the list; its result file stays.</source>
            <translation>{0} wurde aus der Liste entfernt; die Ergebnisdatei bleibt.</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>Rückgängig</translation>
        </message>
        <message>
            <source>Start this job over?</source>
            <translation>Diesen Auftrag von vorn beginnen?</translation>
        </message>
        <message>
            <source>Its answers are deleted, and its result file is replaced when it is done.</source>
            <translation>Seine Antworten werden gelöscht, und die Ergebnisdatei wird ersetzt, wenn er fertig ist.</translation>
        </message>
        <message>
            <source>Start over</source>
            <translation>Von vorn beginnen</translation>
        </message>
        <message>
            <source>1 row was</source>
            <translation>1 Zeile wurde</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows were</source>
            <translation>
                <numerusform>{0} Zeile wurde</numerusform>
                <numerusform>{0} Zeilen wurden</numerusform>
            </translation>
        </message>
        <message>
            <source>This job began with {0}; now {1} is loaded.</source>
            <translation>Dieser Auftrag begann mit {0}; jetzt ist {1} geladen.</translation>
        </message>
        <message>
            <source>{0} answered with the first. Load it to resume; chats then use it too. Starting over deletes those answers.</source>
            <translation>{0} mit dem ersten Modell beantwortet. Laden Sie es, um fortzufahren; auch Chats nutzen es dann. Ein Neubeginn löscht diese Antworten.</translation>
        </message>
        <message>
            <source>Load it and resume</source>
            <translation>Laden und fortsetzen</translation>
        </message>
        <message>
            <source>{0} does not exist yet: it is written when the job is done, paused or stopped.</source>
            <translation>{0} gibt es noch nicht: Die Datei wird geschrieben, wenn der Auftrag fertig, pausiert oder gestoppt ist.</translation>
        </message>
        <message>
            <source>Choose a file of prompts</source>
            <translation>Datei mit Prompts wählen</translation>
        </message>
        <message>
            <source>Folder of prompts</source>
            <translation>Ordner mit Prompts</translation>
        </message>
    </context>
    <context>
        <name>Cache</name>
        <message>
            <source>random</source>
            <translation>zufällig</translation>
        </message>
        <message>
            <source>static popularity</source>
            <translation>feste Beliebtheit</translation>
        </message>
        <message>
            <source>Evicts the least recently used expert.</source>
            <translation>Verdrängt den am längsten nicht genutzten Experten.</translation>
        </message>
        <message>
            <source>Evicts the least frequently used expert.</source>
            <translation>Verdrängt den am seltensten genutzten Experten.</translation>
        </message>
        <message>
            <source>Evicts an expert that is used rarely and not recently.</source>
            <translation>Verdrängt einen Experten, der selten und länger nicht genutzt wurde.</translation>
        </message>
        <message>
            <source>Evicts the oldest expert.</source>
            <translation>Verdrängt den ältesten Experten.</translation>
        </message>
        <message>
            <source>Evicts a random expert.</source>
            <translation>Verdrängt einen zufälligen Experten.</translation>
        </message>
        <message>
            <source>Keeps the most popular experts.</source>
            <translation>Behält die beliebtesten Experten.</translation>
        </message>
        <message>
            <source>previous token</source>
            <translation>vorheriges Token</translation>
        </message>
        <message>
            <source>next layer's gate</source>
            <translation>Gate der nächsten Schicht</translation>
        </message>
        <message>
            <source>correlation table</source>
            <translation>Korrelationstabelle</translation>
        </message>
        <message>
            <source>trained network</source>
            <translation>trainiertes Netz</translation>
        </message>
    </context>
    <context>
        <name>CacheCard</name>
        <message>
            <source>Cache</source>
            <translation>Cache</translation>
        </message>
        <message>
            <source>Expert cache</source>
            <translation>Experten-Cache</translation>
        </message>
        <message>
            <source>The cache keeps the most used experts where they can be reached fastest. A hit is an expert that was already there when it was needed; a miss has to be copied from slower memory first, or computed there.</source>
            <translation>Der Cache hält die meistgenutzten Experten dort, wo sie am schnellsten erreichbar sind. Ein Treffer ist ein Experte, der schon da war, als er gebraucht wurde; bei einem Fehlzugriff muss er erst aus langsamerem Speicher kopiert oder dort berechnet werden.</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>Show this tier's size</source>
            <translation>Größe dieser Stufe anzeigen</translation>
        </message>
        <message>
            <source>nothing to cache</source>
            <translation>nichts zu cachen</translation>
        </message>
        <message>
            <source>policy {0}, adopted</source>
            <translation>Strategie {0}, übernommen</translation>
        </message>
        <message>
            <source>policy {0}</source>
            <translation>Strategie {0}</translation>
        </message>
        <message>
            <source>Chosen while running, by each policy's hit rate</source>
            <translation>Im Betrieb nach der Trefferquote jeder Strategie gewählt</translation>
        </message>
        <message>
            <source>Here a miss costs no more than a hit, so another size would not be faster.</source>
            <translation>Hier kostet ein Fehlzugriff nicht mehr als ein Treffer; eine andere Größe wäre also nicht schneller.</translation>
        </message>
        <message>
            <source>Load a model with experts to see its hit rate and the effect of other cache sizes.</source>
            <translation>Laden Sie ein Modell mit Experten, um dessen Trefferquote und die Wirkung anderer Cache-Größen zu sehen.</translation>
        </message>
        <message>
            <source>All experts are in the graphics card's memory: every one is a hit, and nothing is cached.</source>
            <translation>Alle Experten liegen im Speicher der Grafikkarte: Jeder ist ein Treffer, nichts wird zwischengespeichert.</translation>
        </message>
        <message>
            <source>All experts are in RAM and computed by the CPU, so there is nothing to cache.</source>
            <translation>Alle Experten liegen im RAM und werden von der CPU berechnet; es gibt also nichts zu cachen.</translation>
        </message>
        <message>
            <source>This model has no experts, so there is nothing to cache.</source>
            <translation>Dieses Modell hat keine Experten; es gibt also nichts zu cachen.</translation>
        </message>
    </context>
    <context>
        <name>CallRow</name>
        <message>
            <source>The model wants to call {0}.</source>
            <translation>Das Modell möchte {0} aufrufen.</translation>
        </message>
        <message>
            <source>The model wants to call {0} of the server {1}.</source>
            <translation>Das Modell möchte {0} des Servers {1} aufrufen.</translation>
        </message>
        <message>
            <source>Allow once</source>
            <translation>Einmal erlauben</translation>
        </message>
        <message>
            <source>Allow in this chat</source>
            <translation>In diesem Chat erlauben</translation>
        </message>
        <message>
            <source>Always allow</source>
            <translation>Immer erlauben</translation>
        </message>
        <message>
            <source>Deny</source>
            <translation>Ablehnen</translation>
        </message>
        <message>
            <source>Fold the call</source>
            <translation>Aufruf einklappen</translation>
        </message>
        <message>
            <source>Show arguments and result</source>
            <translation>Argumente und Ergebnis zeigen</translation>
        </message>
        <message>
            <source>unfolded</source>
            <translation>ausgeklappt</translation>
        </message>
        <message>
            <source>folded</source>
            <translation>eingeklappt</translation>
        </message>
        <message>
            <source>Arguments</source>
            <translation>Argumente</translation>
        </message>
        <message>
            <source>Result</source>
            <translation>Ergebnis</translation>
        </message>
    </context>
    <context>
        <name>Catalogue</name>
        <message>
            <source>Strong at reasoning, mathematics and code, with very long documents; for machines with a lot of memory.</source>
            <translation>Stark im Schlussfolgern, in Mathematik und Code, mit sehr langen Dokumenten; für Rechner mit viel Speicher.</translation>
        </message>
        <message>
            <source>English, Chinese and many others</source>
            <translation>Englisch, Chinesisch und viele andere</translation>
        </message>
        <message>
            <source>Reasons step by step before it answers: good at mathematics, code and using tools.</source>
            <translation>Überlegt Schritt für Schritt, bevor es antwortet: gut in Mathematik, Code und mit Werkzeugen.</translation>
        </message>
        <message>
            <source>English, and others less well</source>
            <translation>Englisch, andere weniger gut</translation>
        </message>
        <message>
            <source>The strongest all-round model for machines with 96 GB or more: knowledge, code and long documents.</source>
            <translation>Das stärkste Allround-Modell für Rechner ab 96 GB: Wissen, Code und lange Dokumente.</translation>
        </message>
        <message>
            <source>over 100 languages</source>
            <translation>über 100 Sprachen</translation>
        </message>
        <message>
            <source>Even-tempered chat, writing and code in European languages, with long documents.</source>
            <translation>Ausgeglichen im Gespräch, beim Schreiben und bei Code in europäischen Sprachen, mit langen Dokumenten.</translation>
        </message>
        <message>
            <source>English, French, German, Spanish, Italian and others</source>
            <translation>Englisch, Französisch, Deutsch, Spanisch, Italienisch und andere</translation>
        </message>
        <message>
            <source>Good at writing code over many steps and at using tools; can think before it answers.</source>
            <translation>Gut darin, Code über viele Schritte zu schreiben und Werkzeuge zu nutzen; kann vor der Antwort nachdenken.</translation>
        </message>
        <message>
            <source>English and Chinese</source>
            <translation>Englisch und Chinesisch</translation>
        </message>
        <message>
            <source>Much knowledge for its speed; answers directly, and keeps its pace with very long texts.</source>
            <translation>Viel Wissen für sein Tempo; antwortet direkt und bleibt auch bei sehr langen Texten schnell.</translation>
        </message>
        <message>
            <source>The best all-round choice for PCs with 32 GB: chat, code, reasoning and long documents.</source>
            <translation>Die beste Allround-Wahl für PCs mit 32 GB: Chat, Code, Schlussfolgern und lange Dokumente.</translation>
        </message>
        <message>
            <source>Natural writing in very many languages, general knowledge and summaries.</source>
            <translation>Natürliches Schreiben in sehr vielen Sprachen, Allgemeinwissen und Zusammenfassungen.</translation>
        </message>
        <message>
            <source>over 140 languages</source>
            <translation>über 140 Sprachen</translation>
        </message>
        <message>
            <source>Reasons before it answers; good at mathematics, science and following instructions exactly.</source>
            <translation>Überlegt vor der Antwort; gut in Mathematik, Naturwissenschaft und beim genauen Befolgen von Anweisungen.</translation>
        </message>
        <message>
            <source>English, and five others less well</source>
            <translation>Englisch, fünf andere weniger gut</translation>
        </message>
        <message>
            <source>Writes code over many steps and uses tools well for its size.</source>
            <translation>Schreibt Code über viele Schritte und nutzt Werkzeuge gut für seine Größe.</translation>
        </message>
        <message>
            <source>Reasons step by step and is quick: good at mathematics and code on PCs with 16 GB.</source>
            <translation>Überlegt Schritt für Schritt und ist schnell: gut in Mathematik und Code auf PCs mit 16 GB.</translation>
        </message>
        <message>
            <source>Made for programming: writes, explains and changes code in many languages.</source>
            <translation>Zum Programmieren gemacht: schreibt, erklärt und ändert Code in vielen Sprachen.</translation>
        </message>
        <message>
            <source>A quick all-rounder that answers directly: chat, translation, summaries.</source>
            <translation>Ein schneller Allrounder, der direkt antwortet: Chat, Übersetzung, Zusammenfassungen.</translation>
        </message>
        <message>
            <source>Careful writing in European languages; uses every weight for every token, so it wants a large graphics card.</source>
            <translation>Sorgfältiges Schreiben in europäischen Sprachen; nutzt alle Gewichte für jedes Token und braucht daher eine große Grafikkarte.</translation>
        </message>
        <message>
            <source>Follows instructions and fills in forms and JSON reliably; little memory for long texts.</source>
            <translation>Befolgt Anweisungen und füllt Formulare und JSON zuverlässig aus; behält von langen Texten wenig.</translation>
        </message>
        <message>
            <source>English, German, Spanish, French, Japanese and seven others</source>
            <translation>Englisch, Deutsch, Spanisch, Französisch, Japanisch und sieben andere</translation>
        </message>
        <message>
            <source>General knowledge and writing in Chinese and English at good speed.</source>
            <translation>Allgemeinwissen und Schreiben auf Chinesisch und Englisch bei gutem Tempo.</translation>
        </message>
        <message>
            <source>Chinese and English</source>
            <translation>Chinesisch und Englisch</translation>
        </message>
        <message>
            <source>Pleasant writing in many languages; for graphics cards with 12 GB.</source>
            <translation>Angenehmes Schreiben in vielen Sprachen; für Grafikkarten mit 12 GB.</translation>
        </message>
        <message>
            <source>A solid small model that can think before it answers; for graphics cards with 8 GB.</source>
            <translation>Ein solides kleines Modell, das vor der Antwort nachdenken kann; für Grafikkarten mit 8 GB.</translation>
        </message>
        <message>
            <source>An older model, known from many papers: good for comparisons.</source>
            <translation>Ein älteres Modell, aus vielen Veröffentlichungen bekannt: gut für Vergleiche.</translation>
        </message>
        <message>
            <source>English, French, German, Spanish, Italian</source>
            <translation>Englisch, Französisch, Deutsch, Spanisch, Italienisch</translation>
        </message>
        <message>
            <source>Reasoning and mathematics from textbook-like training; an older model.</source>
            <translation>Schlussfolgern und Mathematik aus lehrbuchartigem Training; ein älteres Modell.</translation>
        </message>
        <message>
            <source>English and 22 others</source>
            <translation>Englisch und 22 andere</translation>
        </message>
        <message>
            <source>Very quick even without a graphics card: summaries, extraction, simple chat.</source>
            <translation>Sehr schnell auch ohne Grafikkarte: Zusammenfassungen, Extraktion, einfacher Chat.</translation>
        </message>
        <message>
            <source>English, Chinese, German, Spanish, French, Japanese and others</source>
            <translation>Englisch, Chinesisch, Deutsch, Spanisch, Französisch, Japanisch und andere</translation>
        </message>
        <message>
            <source>Small and quick: forms, JSON, summaries and tools on old laptops.</source>
            <translation>Klein und schnell: Formulare, JSON, Zusammenfassungen und Werkzeuge auf alten Laptops.</translation>
        </message>
        <message>
            <source>Surprisingly able for its size; for small graphics cards and long texts.</source>
            <translation>Erstaunlich fähig für seine Größe; für kleine Grafikkarten und lange Texte.</translation>
        </message>
        <message>
            <source>Small, with a good sense for numbers and instructions.</source>
            <translation>Klein, mit gutem Gespür für Zahlen und Anweisungen.</translation>
        </message>
        <message>
            <source>Small and open in every respect: weights, data and recipe.</source>
            <translation>Klein und in jeder Hinsicht offen: Gewichte, Daten und Rezept.</translation>
        </message>
        <message>
            <source>English, French, Spanish, German, Italian, Portuguese</source>
            <translation>Englisch, Französisch, Spanisch, Deutsch, Italienisch, Portugiesisch</translation>
        </message>
        <message>
            <source>Open in every respect, and very quick; short texts only.</source>
            <translation>In jeder Hinsicht offen und sehr schnell; nur kurze Texte.</translation>
        </message>
        <message>
            <source>English</source>
            <translation>Englisch</translation>
        </message>
    </context>
    <context>
        <name>Chat</name>
        <message>
            <source>The model wrote no summary: leave the oldest turns out, or try another model.</source>
            <translation>Das Modell hat keine Zusammenfassung geschrieben: Lassen Sie die ältesten Nachrichten weg oder versuchen Sie ein anderes Modell.</translation>
        </message>
        <message>
            <source>Attach a folder</source>
            <translation>Ordner anhängen</translation>
        </message>
        <message>
            <source>Pictures ({0})</source>
            <translation>Bilder ({0})</translation>
        </message>
        <message>
            <source>All files (*)</source>
            <translation>Alle Dateien (*)</translation>
        </message>
        <message>
            <source>Attach files</source>
            <translation>Dateien anhängen</translation>
        </message>
        <message>
            <source>Markdown and JSON of every chat (*.zip)</source>
            <translation>Markdown und JSON aller Chats (*.zip)</translation>
        </message>
        <message>
            <source>Markdown, as shown (*.md)</source>
            <translation>Markdown, wie angezeigt (*.md)</translation>
        </message>
        <message>
            <source>PDF, as shown (*.pdf)</source>
            <translation>PDF, wie angezeigt (*.pdf)</translation>
        </message>
        <message>
            <source>Web page, as shown (*.html)</source>
            <translation>Webseite, wie angezeigt (*.html)</translation>
        </message>
        <message>
            <source>JSON, with all versions and branches (*.json)</source>
            <translation>JSON mit allen Versionen und Verzweigungen (*.json)</translation>
        </message>
        <message>
            <source>Switchyard chats</source>
            <translation>Switchyard-Chats</translation>
        </message>
        <message>
            <source>Export</source>
            <translation>Exportieren</translation>
        </message>
        <message>
            <source>Chats of Switchyard, ChatGPT and LM Studio (*.zip *.json *.md *.markdown)</source>
            <translation>Chats von Switchyard, ChatGPT und LM Studio (*.zip *.json *.md *.markdown)</translation>
        </message>
        <message>
            <source>Import chats</source>
            <translation>Chats importieren</translation>
        </message>
        <message>
            <source>The import was cancelled; what was imported until then stays.</source>
            <translation>Der Import wurde abgebrochen; was bis dahin importiert wurde, bleibt.</translation>
        </message>
        <message>
            <source>1 chat</source>
            <translation>1 Chat</translation>
        </message>
        <message numerus="yes">
            <source>{0} chats</source>
            <translation>
                <numerusform>{0} Chat</numerusform>
                <numerusform>{0} Chats</numerusform>
            </translation>
        </message>
        <message>
            <source>1 that was here has new messages.</source>
            <translation>1 schon vorhandener hat neue Nachrichten.</translation>
        </message>
        <message numerus="yes">
            <source>{0} that were here have new messages.</source>
            <translation>
                <numerusform>{0} schon vorhandener hat neue Nachrichten.</numerusform>
                <numerusform>{0} schon vorhandene haben neue Nachrichten.</numerusform>
            </translation>
        </message>
        <message>
            <source>1 was already here and is unchanged.</source>
            <translation>1 war schon vorhanden und bleibt unverändert.</translation>
        </message>
        <message numerus="yes">
            <source>{0} were already here and are unchanged.</source>
            <translation>
                <numerusform>{0} war schon vorhanden und bleibt unverändert.</numerusform>
                <numerusform>{0} waren schon vorhanden und bleiben unverändert.</numerusform>
            </translation>
        </message>
        <message>
            <source>1 chat is damaged and could not be read.</source>
            <translation>1 Chat ist beschädigt und konnte nicht gelesen werden.</translation>
        </message>
        <message numerus="yes">
            <source>{0} chats are damaged and could not be read.</source>
            <translation>
                <numerusform>{0} Chat ist beschädigt und konnte nicht gelesen werden.</numerusform>
                <numerusform>{0} Chats sind beschädigt und konnten nicht gelesen werden.</numerusform>
            </translation>
        </message>
        <message>
            <source>The file ends in the middle: what comes after that is not in it.</source>
            <translation>Die Datei endet mittendrin: Was danach käme, ist nicht enthalten.</translation>
        </message>
        <message>
            <source>Left out: {0}.</source>
            <translation>Weggelassen: {0}.</translation>
        </message>
        <message>
            <source>{0} was not imported: {1}.</source>
            <translation>{0} wurde nicht importiert: {1}.</translation>
        </message>
        <message numerus="yes">
            <source>Neither were {0} other files.</source>
            <translation>
                <numerusform>Ebenso wenig {0} weitere Datei.</numerusform>
                <numerusform>Ebenso wenig {0} weitere Dateien.</numerusform>
            </translation>
        </message>
        <message>
            <source>Imported: {0}.</source>
            <translation>Importiert: {0}.</translation>
        </message>
        <message>
            <source>tool calls ({0})</source>
            <translation>Werkzeugaufrufe ({0})</translation>
        </message>
        <message>
            <source>pictures ({0})</source>
            <translation>Bilder ({0})</translation>
        </message>
        <message>
            <source>attached files ({0})</source>
            <translation>angehängte Dateien ({0})</translation>
        </message>
        <message>
            <source>settings of single chats ({0})</source>
            <translation>Einstellungen einzelner Chats ({0})</translation>
        </message>
        <message>
            <source>chats without messages ({0})</source>
            <translation>Chats ohne Nachrichten ({0})</translation>
        </message>
        <message>
            <source>parts of an unknown kind ({0})</source>
            <translation>Teile unbekannter Art ({0})</translation>
        </message>
        <message>
            <source>New chat</source>
            <translation>Neuer Chat</translation>
        </message>
        <message>
            <source>Scratch chat</source>
            <translation>Temporärer Chat</translation>
        </message>
        <message>
            <source>Scratch, not stored</source>
            <translation>Temporär, nicht gespeichert</translation>
        </message>
        <message>
            <source>Folders</source>
            <translation>Ordner</translation>
        </message>
        <message>
            <source>Pinned</source>
            <translation>Angeheftet</translation>
        </message>
        <message>
            <source>Today</source>
            <translation>Heute</translation>
        </message>
        <message>
            <source>Yesterday</source>
            <translation>Gestern</translation>
        </message>
        <message>
            <source>Previous 7 days</source>
            <translation>Letzte 7 Tage</translation>
        </message>
        <message>
            <source>Older</source>
            <translation>Älter</translation>
        </message>
        <message>
            <source>Found</source>
            <translation>Gefunden</translation>
        </message>
        <message>
            <source>Fold earlier turns</source>
            <translation>Frühere Nachrichten zusammenfassen</translation>
        </message>
        <message>
            <source>The model summarises them, and reads the summary instead.</source>
            <translation>Das Modell fasst sie zusammen und liest stattdessen die Zusammenfassung.</translation>
        </message>
        <message>
            <source>Leave out the oldest</source>
            <translation>Die ältesten weglassen</translation>
        </message>
        <message>
            <source>The model reads nothing of them; they are kept.</source>
            <translation>Das Modell liest nichts davon; sie bleiben erhalten.</translation>
        </message>
        <message>
            <source>Ask in a new chat</source>
            <translation>In neuem Chat fragen</translation>
        </message>
        <message>
            <source>Send anyway</source>
            <translation>Trotzdem senden</translation>
        </message>
        <message>
            <source>Not now</source>
            <translation>Nicht jetzt</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Abbrechen</translation>
        </message>
        <message>
            <source>The earlier turns were not folded: {0}</source>
            <translation>Die früheren Nachrichten wurden nicht zusammengefasst: {0}</translation>
        </message>
        <message>
            <source>Delete its chat, too</source>
            <translation>Auch den Chat darin löschen</translation>
        </message>
        <message numerus="yes">
            <source>Delete its {0} chats, too</source>
            <translation>
                <numerusform>Auch den {0} Chat darin löschen</numerusform>
                <numerusform>Auch die {0} Chats darin löschen</numerusform>
            </translation>
        </message>
        <message>
            <source>Delete the folder “{0}”?</source>
            <translation>Ordner „{0}“ löschen?</translation>
        </message>
        <message>
            <source>Its chats can stay, outside of any folder. Either way you can undo it.</source>
            <translation>Seine Chats können außerhalb von Ordnern bleiben. Beides lässt sich rückgängig machen.</translation>
        </message>
        <message>
            <source>Delete only the folder</source>
            <translation>Nur den Ordner löschen</translation>
        </message>
        <message>
            <source>The folder “{0}” was deleted.</source>
            <translation>Der Ordner „{0}“ wurde gelöscht.</translation>
        </message>
        <message>
            <source>New folder</source>
            <translation>Neuer Ordner</translation>
        </message>
        <message>
            <source>New folder {0}</source>
            <translation>Neuer Ordner {0}</translation>
        </message>
        <message>
            <source>The message was deleted.</source>
            <translation>Die Nachricht wurde gelöscht.</translation>
        </message>
        <message>
            <source>The message was changed.</source>
            <translation>Die Nachricht wurde geändert.</translation>
        </message>
        <message>
            <source>Earlier turns are folded into a summary.</source>
            <translation>Frühere Nachrichten sind zusammengefasst.</translation>
        </message>
        <message>
            <source>The oldest turns are left out of what the model reads.</source>
            <translation>Die ältesten Nachrichten liest das Modell nicht mehr.</translation>
        </message>
        <message>
            <source>The turns are sent as they are again.</source>
            <translation>Die Nachrichten werden wieder im Wortlaut gesendet.</translation>
        </message>
        <message>
            <source>The summary was changed.</source>
            <translation>Die Zusammenfassung wurde geändert.</translation>
        </message>
        <message>
            <source>An answer is being written here: wait for it, or stop it first.</source>
            <translation>Hier wird gerade eine Antwort geschrieben: Warten Sie darauf oder stoppen Sie sie zuerst.</translation>
        </message>
        <message>
            <source>waiting for the engine, which is not running</source>
            <translation>wartet auf die Engine, die nicht läuft</translation>
        </message>
        <message>
            <source>waiting for a model: none is loaded</source>
            <translation>wartet auf ein Modell: Keines ist geladen</translation>
        </message>
        <message>
            <source>waiting for the model to load</source>
            <translation>wartet, bis das Modell geladen ist</translation>
        </message>
        <message>
            <source>searching the documents</source>
            <translation>sieht in den Dokumenten nach</translation>
        </message>
        <message>
            <source>starting the servers with the tools</source>
            <translation>Server mit Werkzeugen werden gestartet</translation>
        </message>
        <message>
            <source>waiting for you to allow a call</source>
            <translation>wartet auf Ihre Erlaubnis für einen Aufruf</translation>
        </message>
        <message>
            <source>waiting for a tool</source>
            <translation>wartet auf ein Werkzeug</translation>
        </message>
        <message>
            <source>waiting for another answer</source>
            <translation>wartet auf eine andere Antwort</translation>
        </message>
        <message>
            <source>waiting for the first token from the other server</source>
            <translation>wartet auf das erste Token des anderen Servers</translation>
        </message>
        <message>
            <source>reading the prompt</source>
            <translation>liest den Prompt</translation>
        </message>
        <message>
            <source>thinking</source>
            <translation>denkt nach</translation>
        </message>
        <message>
            <source>writing</source>
            <translation>schreibt</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} Token/s</translation>
        </message>
        <message>
            <source>first token {0} s</source>
            <translation>erstes Token nach {0} s</translation>
        </message>
        <message>
            <source>1 token</source>
            <translation>1 Token</translation>
        </message>
        <message numerus="yes">
            <source>{0} tokens</source>
            <translation>
                <numerusform>{0} Token</numerusform>
                <numerusform>{0} Token</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} of {1} drafted tokens accepted</source>
            <translation>{0} von {1} Entwurfs-Token übernommen</translation>
        </message>
        <message>
            <source>reached the limit</source>
            <translation>Grenze erreicht</translation>
        </message>
        <message>
            <source>the context is full</source>
            <translation>der Kontext ist voll</translation>
        </message>
        <message>
            <source>edited</source>
            <translation>bearbeitet</translation>
        </message>
        <message>
            <source>stopped</source>
            <translation>gestoppt</translation>
        </message>
        <message>
            <source>picture read before</source>
            <translation>Bild schon gelesen</translation>
        </message>
        <message>
            <source>picture read in {0} s</source>
            <translation>Bild in {0} s gelesen</translation>
        </message>
        <message>
            <source>{0} pictures read in {1} s</source>
            <translation>{0} Bilder in {1} s gelesen</translation>
        </message>
        <message>
            <source>{0} pictures read before</source>
            <translation>{0} Bilder schon gelesen</translation>
        </message>
        <message>
            <source>{0} of {1} pictures read before, the others in {2} s</source>
            <translation>{0} von {1} Bildern schon gelesen, die übrigen in {2} s</translation>
        </message>
        <message>
            <source>Thinking… {0}</source>
            <translation>Denkt nach… {0}</translation>
        </message>
        <message>
            <source>Thought</source>
            <translation>Nachgedacht</translation>
        </message>
        <message>
            <source>Thought for {0}</source>
            <translation>{0} nachgedacht</translation>
        </message>
        <message>
            <source>The answer is incomplete.</source>
            <translation>Die Antwort ist unvollständig.</translation>
        </message>
        <message>
            <source>The text so far is kept.</source>
            <translation>Der bisherige Text bleibt erhalten.</translation>
        </message>
        <message>
            <source>Your message is kept: make room, edit it, or start a new chat.</source>
            <translation>Ihre Nachricht bleibt erhalten: Schaffen Sie Platz, bearbeiten Sie sie oder beginnen Sie einen neuen Chat.</translation>
        </message>
        <message>
            <source>The context was full before the answer began: make room, and ask again.</source>
            <translation>Der Kontext war voll, bevor die Antwort begann: Schaffen Sie Platz und fragen Sie erneut.</translation>
        </message>
        <message>
            <source>It was still thinking when it reached the limit: raise Max tokens, or let it think less.</source>
            <translation>Das Modell dachte noch nach, als es die Grenze erreichte: Erhöhen Sie „Max. Token“ oder lassen Sie es weniger nachdenken.</translation>
        </message>
        <message>
            <source>The answer ran into the end of the context: make room, and let it continue.</source>
            <translation>Die Antwort stieß an das Ende des Kontexts: Schaffen Sie Platz und lassen Sie sie fortsetzen.</translation>
        </message>
        <message>
            <source>{0} tokens of context</source>
            <translation>{0} Token Kontext</translation>
        </message>
        <message>
            <source>for new chats</source>
            <translation>für neue Chats</translation>
        </message>
        <message>
            <source>sees pictures</source>
            <translation>sieht Bilder</translation>
        </message>
        <message>
            <source>default</source>
            <translation>Standard</translation>
        </message>
        <message>
            <source>loaded</source>
            <translation>geladen</translation>
        </message>
        <message>
            <source>measured</source>
            <translation>gemessen</translation>
        </message>
        <message>
            <source>predicted</source>
            <translation>vorhergesagt</translation>
        </message>
        <message>
            <source>The only model there</source>
            <translation>Das einzige Modell dort</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>Startmodell</translation>
        </message>
        <message>
            <source>Sent to {0}, another program on this PC</source>
            <translation>An {0} gesendet, ein anderes Programm auf diesem PC</translation>
        </message>
        <message>
            <source>Sent to {0}</source>
            <translation>An {0} gesendet</translation>
        </message>
        <message>
            <source>{0}: what you write in this chat stays on this PC.</source>
            <translation>{0}: Was Sie in diesem Chat schreiben, bleibt auf diesem PC.</translation>
        </message>
        <message>
            <source>{0}: what you write in this chat leaves this PC.</source>
            <translation>{0}: Was Sie in diesem Chat schreiben, verlässt diesen PC.</translation>
        </message>
        <message>
            <source>top-k</source>
            <translation>Top-k</translation>
        </message>
        <message>
            <source>min-p</source>
            <translation>Min-p</translation>
        </message>
        <message>
            <source>the repetition penalty</source>
            <translation>die Wiederholungsstrafe</translation>
        </message>
        <message>
            <source>loop guard</source>
            <translation>Schleifenschutz</translation>
        </message>
        <message>
            <source>beam search</source>
            <translation>Beam-Suche</translation>
        </message>
        <message>
            <source>how much to think</source>
            <translation>wie viel nachgedacht wird</translation>
        </message>
        <message>
            <source>It does not take this chat's {0}.</source>
            <translation>Dies wird aus diesem Chat nicht übernommen: {0}.</translation>
        </message>
        <message>
            <source>{0} of {1} reads text only: choose another model to send pictures.</source>
            <translation>{0} auf {1} liest nur Text: Wählen Sie ein anderes Modell, um Bilder zu senden.</translation>
        </message>
        <message>
            <source>The model</source>
            <translation>Das Modell</translation>
        </message>
        <message>
            <source>{0} reads text only.</source>
            <translation>{0} liest nur Text.</translation>
        </message>
        <message>
            <source>No model on this PC sees pictures.</source>
            <translation>Kein Modell auf diesem PC sieht Bilder.</translation>
        </message>
        <message>
            <source>{0} and {1} more</source>
            <translation>{0} und {1} weitere</translation>
        </message>
        <message>
            <source>On this PC these see pictures: {0}.</source>
            <translation>Auf diesem PC sehen diese Modelle Bilder: {0}.</translation>
        </message>
        <message>
            <source>Your message has about {0} tokens; the model reads {1}. Shorten it.</source>
            <translation>Ihre Nachricht hat etwa {0} Token; das Modell liest {1}. Kürzen Sie sie.</translation>
        </message>
        <message>
            <source>With your message this chat has about {0} tokens; the model reads {1}. Make room, or ask in a new chat.</source>
            <translation>Mit Ihrer Nachricht hat dieser Chat etwa {0} Token; das Modell liest {1}. Schaffen Sie Platz oder fragen Sie in einem neuen Chat.</translation>
        </message>
        <message>
            <source>With your message this chat has about {0} tokens; the model reads {1}. Ask in a new chat.</source>
            <translation>Mit Ihrer Nachricht hat dieser Chat etwa {0} Token; das Modell liest {1}. Fragen Sie in einem neuen Chat.</translation>
        </message>
        <message>
            <source>This chat takes {0} of the {1} tokens the model reads. Make room before it is full.</source>
            <translation>Dieser Chat belegt {0} der {1} Token, die das Modell liest. Schaffen Sie Platz, bevor der Kontext voll ist.</translation>
        </message>
        <message>
            <source>The context is full: {0} of {1} tokens are taken. Make room, or ask in a new chat.</source>
            <translation>Der Kontext ist voll: {0} von {1} Token sind belegt. Schaffen Sie Platz oder fragen Sie in einem neuen Chat.</translation>
        </message>
        <message>
            <source>The earlier turns are summarised once the model is idle.</source>
            <translation>Die früheren Nachrichten werden zusammengefasst, sobald das Modell Zeit hat.</translation>
        </message>
        <message>
            <source>Summarising the earlier turns… {0}. Your messages come first.</source>
            <translation>Frühere Nachrichten werden zusammengefasst… {0}. Ihre Nachrichten haben Vorrang.</translation>
        </message>
        <message>
            <source>Reading… {0}</source>
            <translation>Wird gelesen… {0}</translation>
        </message>
        <message>
            <source>Reading…</source>
            <translation>Wird gelesen…</translation>
        </message>
        <message>
            <source>folder</source>
            <translation>Ordner</translation>
        </message>
        <message>
            <source>file</source>
            <translation>Datei</translation>
        </message>
        <message>
            <source>This {0} {1}.</source>
            <translation>{0}: {1}.</translation>
        </message>
        <message>
            <source>Not read yet</source>
            <translation>Noch nicht gelesen</translation>
        </message>
        <message>
            <source>1 file</source>
            <translation>1 Datei</translation>
        </message>
        <message numerus="yes">
            <source>{0} files</source>
            <translation>
                <numerusform>{0} Datei</numerusform>
                <numerusform>{0} Dateien</numerusform>
            </translation>
        </message>
        <message>
            <source>1 page</source>
            <translation>1 Seite</translation>
        </message>
        <message numerus="yes">
            <source>{0} pages</source>
            <translation>
                <numerusform>{0} Seite</numerusform>
                <numerusform>{0} Seiten</numerusform>
            </translation>
        </message>
        <message>
            <source>about {0} tokens</source>
            <translation>etwa {0} Token</translation>
        </message>
        <message>
            <source>goes to {0}</source>
            <translation>geht an {0}</translation>
        </message>
        <message>
            <source>page {0}</source>
            <translation>Seite {0}</translation>
        </message>
        <message>
            <source>There was no room for {0} beside this chat: ask in a new chat, or shorten this one.</source>
            <translation>Neben diesem Chat war kein Platz für {0}: Fragen Sie in einem neuen Chat oder kürzen Sie diesen.</translation>
        </message>
        <message>
            <source>The documents could not be searched ({0}), so the answer is given without them.</source>
            <translation>In den Dokumenten konnte nicht nachgesehen werden ({0}): Die Antwort kommt ohne sie.</translation>
        </message>
        <message>
            <source>It reads text only: the pictures in this chat are not sent.</source>
            <translation>Es liest nur Text: Die Bilder in diesem Chat werden nicht gesendet.</translation>
        </message>
        <message>
            <source>This model reads text only: the pictures in this chat are not read.</source>
            <translation>Dieses Modell liest nur Text: Die Bilder in diesem Chat werden nicht gelesen.</translation>
        </message>
        <message>
            <source>The server {0} is no longer in the list, and nothing else answers here: choose a model for this chat.</source>
            <translation>Der Server {0} ist nicht mehr in der Liste, und sonst antwortet hier nichts: Wählen Sie ein Modell für diesen Chat.</translation>
        </message>
        <message>
            <source>1 thread</source>
            <translation>1 Thread</translation>
        </message>
        <message numerus="yes">
            <source>{0} threads</source>
            <translation>
                <numerusform>{0} Thread</numerusform>
                <numerusform>{0} Threads</numerusform>
            </translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>Chat</source>
            <translation>Chat</translation>
        </message>
        <message>
            <source>Please continue.</source>
            <translation>Bitte fahre fort.</translation>
        </message>
        <message>
            <source>Branch: {0}</source>
            <translation>Verzweigung: {0}</translation>
        </message>
        <message>
            <source>Picture</source>
            <translation>Bild</translation>
        </message>
        <message>
            <source>Custom</source>
            <translation>Eigene</translation>
        </message>
        <message>
            <source>Precise</source>
            <translation>Präzise</translation>
        </message>
        <message>
            <source>Balanced</source>
            <translation>Ausgewogen</translation>
        </message>
        <message>
            <source>Creative</source>
            <translation>Kreativ</translation>
        </message>
        <message>
            <source>{0} beams</source>
            <translation>{0} Beams</translation>
        </message>
        <message>
            <source>always the likeliest token</source>
            <translation>immer das wahrscheinlichste Token</translation>
        </message>
        <message>
            <source>temperature {0}</source>
            <translation>Temperatur {0}</translation>
        </message>
        <message>
            <source>top-k {0}</source>
            <translation>Top-k {0}</translation>
        </message>
        <message>
            <source>top-p {0}</source>
            <translation>Top-p {0}</translation>
        </message>
        <message>
            <source>min-p {0}</source>
            <translation>Min-p {0}</translation>
        </message>
        <message>
            <source>repetition penalty {0}</source>
            <translation>Wiederholungsstrafe {0}</translation>
        </message>
        <message>
            <source>presence penalty {0}</source>
            <translation>Präsenzstrafe {0}</translation>
        </message>
        <message>
            <source>frequency penalty {0}</source>
            <translation>Häufigkeitsstrafe {0}</translation>
        </message>
        <message>
            <source>loop guard {0}</source>
            <translation>Schleifenschutz {0}</translation>
        </message>
        <message>
            <source>thinking {0}</source>
            <translation>Nachdenken: {0}</translation>
        </message>
    </context>
    <context>
        <name>ChatDocument</name>
        <message>
            <source>Chat</source>
            <translation>Chat</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>System-Prompt</translation>
        </message>
        <message>
            <source>nothing could be written there</source>
            <translation>dort konnte nichts geschrieben werden</translation>
        </message>
        <message>
            <source>Assistant</source>
            <translation>Assistent</translation>
        </message>
        <message>
            <source>You</source>
            <translation>Sie</translation>
        </message>
        <message>
            <source>Thoughts</source>
            <translation>Gedanken</translation>
        </message>
        <message>
            <source>picture</source>
            <translation>Bild</translation>
        </message>
    </context>
    <context>
        <name>ChatFiles</name>
        <message>
            <source>The export was cancelled; no file was written.</source>
            <translation>Der Export wurde abgebrochen; keine Datei wurde geschrieben.</translation>
        </message>
        <message>
            <source>Chat</source>
            <translation>Chat</translation>
        </message>
    </context>
    <context>
        <name>ChatStore</name>
        <message>
            <source>The chats in {path} were written by a newer Switchyard and are not changed. Chats made now are lost when the window closes: update Switchyard first.</source>
            <translation>Die Chats in {path} stammen von einem neueren Switchyard und werden nicht geändert. Jetzt geführte Chats gehen verloren, wenn das Fenster geschlossen wird: Aktualisieren Sie zuerst Switchyard.</translation>
        </message>
        <message>
            <source>{folder} is read-only, so you can read your chats but not save new ones: what you write now is lost when the window closes. Make the folder writable and restart Switchyard.</source>
            <translation>{folder} ist schreibgeschützt: Sie können Ihre Chats lesen, aber keine neuen speichern. Was Sie jetzt schreiben, geht verloren, wenn das Fenster geschlossen wird. Heben Sie den Schreibschutz auf und starten Sie Switchyard neu.</translation>
        </message>
        <message>
            <source>The chat database was damaged. Recovered chats: {conversations}, messages: {messages}; messages lost: {lost}. The damaged file is kept as {path}.</source>
            <translation>Die Chat-Datenbank war beschädigt. Wiederhergestellte Chats: {conversations}, Nachrichten: {messages}; verlorene Nachrichten: {lost}. Die beschädigte Datei bleibt als {path} erhalten.</translation>
        </message>
        <message>
            <source>The chat database was damaged and has been repaired (chats: {conversations}, messages: {messages}); no message seems to be missing. The damaged file is kept as {path}.</source>
            <translation>Die Chat-Datenbank war beschädigt und wurde repariert (Chats: {conversations}, Nachrichten: {messages}); anscheinend fehlt keine Nachricht. Die beschädigte Datei bleibt als {path} erhalten.</translation>
        </message>
        <message>
            <source>The chat database was damaged and no message could be read from it. The damaged file is kept as {path}.</source>
            <translation>Die Chat-Datenbank war beschädigt, und keine Nachricht darin war lesbar. Die beschädigte Datei bleibt als {path} erhalten.</translation>
        </message>
        <message>
            <source>The disk is full, so new text is not saved: free some space on the disk of {folder}.</source>
            <translation>Der Datenträger ist voll, daher wird neuer Text nicht gespeichert: Geben Sie Platz auf dem Datenträger von {folder} frei.</translation>
        </message>
        <message>
            <source>Another program is using the chats in {folder}, so new text is not saved: close it.</source>
            <translation>Ein anderes Programm verwendet die Chats in {folder}, daher wird neuer Text nicht gespeichert: Schließen Sie es.</translation>
        </message>
        <message>
            <source>Chats cannot be saved in {folder} ({why}): check that it can be written to.</source>
            <translation>Chats können in {folder} nicht gespeichert werden ({why}): Prüfen Sie, ob dort geschrieben werden darf.</translation>
        </message>
        <message>
            <source>Switchyard closed during this answer.</source>
            <translation>Switchyard wurde während dieser Antwort geschlossen.</translation>
        </message>
    </context>
    <context>
        <name>ChatTransfer</name>
        <message>
            <source>Cancel</source>
            <translation>Abbrechen</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>Schließen</translation>
        </message>
        <message>
            <source>Writing {0}…</source>
            <translation>{0} wird geschrieben…</translation>
        </message>
        <message numerus="yes">
            <source>{0} files</source>
            <translation>
                <numerusform>{0} Datei</numerusform>
                <numerusform>{0} Dateien</numerusform>
            </translation>
        </message>
        <message>
            <source>Importing {0}…</source>
            <translation>{0} wird importiert…</translation>
        </message>
        <message>
            <source>{0} {1}, {2} chats so far</source>
            <translation>{0} {1}, bisher {2} Chats</translation>
        </message>
        <message>
            <source>Written to {0}</source>
            <translation>Gespeichert in {0}</translation>
        </message>
    </context>
    <context>
        <name>ChatView</name>
        <message>
            <source>Dismiss</source>
            <translation>Schließen</translation>
        </message>
        <message>
            <source>Keep this chat</source>
            <translation>Diesen Chat behalten</translation>
        </message>
        <message>
            <source>Close for good</source>
            <translation>Endgültig schließen</translation>
        </message>
        <message>
            <source>The starter is a small demo model: it gets facts wrong and may repeat itself.</source>
            <translation>Das Startmodell ist ein kleines Demo-Modell: Es irrt sich in Fakten und wiederholt sich mitunter.</translation>
        </message>
        <message>
            <source>New chat</source>
            <translation>Neuer Chat</translation>
        </message>
        <message>
            <source>Find in this chat</source>
            <translation>In diesem Chat suchen</translation>
        </message>
        <message>
            <source>Next match</source>
            <translation>Nächste Fundstelle</translation>
        </message>
        <message>
            <source>Previous match</source>
            <translation>Vorherige Fundstelle</translation>
        </message>
        <message>
            <source>New scratch chat, which is never stored</source>
            <translation>Neuer temporärer Chat, der nie gespeichert wird</translation>
        </message>
        <message>
            <source>Search chats</source>
            <translation>Chats durchsuchen</translation>
        </message>
        <message>
            <source>Choose the model</source>
            <translation>Modell wählen</translation>
        </message>
        <message>
            <source>Rename chat</source>
            <translation>Chat umbenennen</translation>
        </message>
        <message>
            <source>Stop the answer</source>
            <translation>Antwort stoppen</translation>
        </message>
        <message>
            <source>Undo the last deletion or change of a chat</source>
            <translation>Letzte Löschung oder Änderung eines Chats rückgängig machen</translation>
        </message>
        <message>
            <source>Previous chat</source>
            <translation>Vorheriger Chat</translation>
        </message>
        <message>
            <source>Next chat</source>
            <translation>Nächster Chat</translation>
        </message>
        <message>
            <source>Attach files</source>
            <translation>Dateien anhängen</translation>
        </message>
        <message>
            <source>Print the chat</source>
            <translation>Chat drucken</translation>
        </message>
        <message>
            <source>Ask two, side by side</source>
            <translation>Zwei fragen, nebeneinander</translation>
        </message>
        <message>
            <source>Write a message</source>
            <translation>Nachricht schreiben</translation>
        </message>
        <message>
            <source>Enter</source>
            <translation>Eingabe</translation>
        </message>
        <message>
            <source>Send</source>
            <translation>Senden</translation>
        </message>
        <message>
            <source>Shift+Enter</source>
            <translation>Umschalt+Eingabe</translation>
        </message>
        <message>
            <source>Start a new line</source>
            <translation>Neue Zeile beginnen</translation>
        </message>
        <message>
            <source>The whole chat goes there, now and with each further message: your messages, their pictures and what is read of their documents, the answers and the system prompt. What happens with it is up to who runs that server.</source>
            <translation>Der ganze Chat geht dorthin, jetzt und mit jeder weiteren Nachricht: Ihre Nachrichten, deren Bilder und was aus ihren Dokumenten gelesen wird, die Antworten und der System-Prompt. Was damit geschieht, bestimmt, wer diesen Server betreibt.</translation>
        </message>
        <message>
            <source>The way there is not encrypted: others in the network can read it.</source>
            <translation>Der Weg dorthin ist nicht verschlüsselt: Andere im Netzwerk können mitlesen.</translation>
        </message>
        <message>
            <source>Send this chat to {0}?</source>
            <translation>Diesen Chat an {0} senden?</translation>
        </message>
        <message>
            <source>Send it there</source>
            <translation>Dorthin senden</translation>
        </message>
        <message>
            <source>A scratch chat is never stored: to print it, keep it first.</source>
            <translation>Ein temporärer Chat wird nie gespeichert: Um ihn zu drucken, behalten Sie ihn zuerst.</translation>
        </message>
        <message>
            <source>Scratch chat: nothing of it is stored, and it is gone once it is closed.</source>
            <translation>Temporärer Chat: Nichts davon wird gespeichert, und er ist weg, sobald er geschlossen wird.</translation>
        </message>
        <message>
            <source>Undo  Ctrl+Z</source>
            <translation>Rückgängig  Strg+Z</translation>
        </message>
        <message>
            <source>The scratch chat is gone.</source>
            <translation>Der temporäre Chat ist weg.</translation>
        </message>
        <message>
            <source>“{0}” was deleted.</source>
            <translation>„{0}“ wurde gelöscht.</translation>
        </message>
        <message>
            <source>The model is loading{0}. You can write now; the answer follows.</source>
            <translation>Das Modell wird geladen{0}. Sie können schon schreiben; die Antwort folgt.</translation>
        </message>
        <message>
            <source>No model is loaded. You can write now; the answer follows once one is loaded.</source>
            <translation>Kein Modell ist geladen. Sie können schon schreiben; die Antwort folgt, sobald eines geladen ist.</translation>
        </message>
        <message>
            <source>{0} runs on this machine; nothing you write leaves it.</source>
            <translation>{0} läuft auf diesem Rechner; nichts, was Sie schreiben, verlässt ihn.</translation>
        </message>
    </context>
    <context>
        <name>Column</name>
        <message>
            <source>First</source>
            <translation>Erste</translation>
        </message>
        <message>
            <source>Second</source>
            <translation>Zweite</translation>
        </message>
        <message>
            <source>{0}: model</source>
            <translation>{0}: Modell</translation>
        </message>
        <message>
            <source>{0}: sampling</source>
            <translation>{0}: Sampling</translation>
        </message>
        <message>
            <source>{0} answer</source>
            <translation>{0} Antwort</translation>
        </message>
        <message>
            <source>Go on with this</source>
            <translation>Damit fortfahren</translation>
        </message>
        <message>
            <source>Go on with the {0} answer</source>
            <translation>Mit der Antwort fortfahren: {0}</translation>
        </message>
    </context>
    <context>
        <name>Comparison</name>
        <message>
            <source>One model is open at a time on this PC: this answer comes second.</source>
            <translation>Auf diesem PC ist immer nur ein Modell geöffnet: Diese Antwort kommt als zweite.</translation>
        </message>
        <message>
            <source>The model is loading; its answer follows.</source>
            <translation>Das Modell wird geladen; seine Antwort folgt.</translation>
        </message>
        <message>
            <source>The model was not loaded, so there is no answer from it.</source>
            <translation>Das Modell wurde nicht geladen, daher gibt es keine Antwort von ihm.</translation>
        </message>
    </context>
    <context>
        <name>Composer</name>
        <message>
            <source>Message Switchyard…</source>
            <translation>Nachricht an Switchyard…</translation>
        </message>
        <message>
            <source>Message</source>
            <translation>Nachricht</translation>
        </message>
        <message>
            <source>Enter sends, Shift+Enter starts a new line</source>
            <translation>Eingabe sendet, Umschalt+Eingabe beginnt eine neue Zeile</translation>
        </message>
        <message>
            <source>Attach files or a folder</source>
            <translation>Dateien oder einen Ordner anhängen</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>System-Prompt</translation>
        </message>
        <message>
            <source>Instructions the model reads first</source>
            <translation>Anweisungen, die das Modell zuerst liest</translation>
        </message>
        <message>
            <source>The model may call tools in this chat</source>
            <translation>Das Modell darf in diesem Chat Werkzeuge aufrufen</translation>
        </message>
        <message>
            <source>Let the model call tools</source>
            <translation>Das Modell Werkzeuge aufrufen lassen</translation>
        </message>
        <message>
            <source>Sampling: {0}</source>
            <translation>Sampling: {0}</translation>
        </message>
        <message>
            <source>How the next token is chosen: {0}</source>
            <translation>Wie das nächste Token gewählt wird: {0}</translation>
        </message>
        <message>
            <source>Files…</source>
            <translation>Dateien…</translation>
        </message>
        <message>
            <source>Folder…</source>
            <translation>Ordner…</translation>
        </message>
        <message>
            <source>System</source>
            <translation>System</translation>
        </message>
        <message>
            <source>Stop  Esc</source>
            <translation>Stoppen  Esc</translation>
        </message>
        <message>
            <source>Send</source>
            <translation>Senden</translation>
        </message>
        <message>
            <source>Stop the answer</source>
            <translation>Antwort stoppen</translation>
        </message>
    </context>
    <context>
        <name>ComputingCard</name>
        <message>
            <source>Time it</source>
            <translation>Messen</translation>
        </message>
        <message>
            <source>Loads the model with these settings, has it write a little, and measures that</source>
            <translation>Lädt das Modell mit diesen Einstellungen, lässt es etwas schreiben und misst das</translation>
        </message>
        <message>
            <source>Reload model</source>
            <translation>Modell neu laden</translation>
        </message>
        <message>
            <source>Changes apply at the next start, or now with these buttons.</source>
            <translation>Änderungen gelten ab dem nächsten Start oder mit diesen Schaltflächen sofort.</translation>
        </message>
        <message>
            <source>Loading the model and timing it…</source>
            <translation>Modell wird geladen und gemessen…</translation>
        </message>
        <message>
            <source>{0}: {1} tokens/s, measured just now</source>
            <translation>{0}: {1} Token/s, eben gemessen</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>Startmodell</translation>
        </message>
        <message>
            <source>No graphics card computes here.</source>
            <translation>Hier rechnet keine Grafikkarte.</translation>
        </message>
        <message>
            <source>{0}: {1} tokens/s, measured</source>
            <translation>{0}: {1} Token/s, gemessen</translation>
        </message>
        <message>
            <source>{0}: about {1} tokens/s, {2} to {3}</source>
            <translation>{0}: etwa {1} Token/s, {2} bis {3}</translation>
        </message>
    </context>
    <context>
        <name>ContextMeter</name>
        <message>
            <source>Context</source>
            <translation>Kontext</translation>
        </message>
        <message>
            <source>Estimate, including your draft; the engine counts with the next answer.</source>
            <translation>Schätzung mit Ihrem Entwurf; genau zählt die Engine mit der nächsten Antwort.</translation>
        </message>
        <message>
            <source>Counted by the engine after the last answer.</source>
            <translation>Von der Engine nach der letzten Antwort gezählt.</translation>
        </message>
        <message>
            <source>Click to see and change the length.</source>
            <translation>Klicken, um die Länge zu sehen und zu ändern.</translation>
        </message>
        <message>
            <source>context {0} of {1}</source>
            <translation>Kontext {0} von {1}</translation>
        </message>
        <message>
            <source>context about {0} of {1}</source>
            <translation>Kontext etwa {0} von {1}</translation>
        </message>
        <message>
            <source>context filling up: {0} of {1}</source>
            <translation>Kontext wird voll: {0} von {1}</translation>
        </message>
        <message>
            <source>context filling up: about {0} of {1}</source>
            <translation>Kontext wird voll: etwa {0} von {1}</translation>
        </message>
        <message>
            <source>context almost full: {0} of {1}</source>
            <translation>Kontext fast voll: {0} von {1}</translation>
        </message>
        <message>
            <source>context almost full: about {0} of {1}</source>
            <translation>Kontext fast voll: etwa {0} von {1}</translation>
        </message>
        <message>
            <source>context exceeded: {0} of {1}</source>
            <translation>Kontext überschritten: {0} von {1}</translation>
        </message>
        <message>
            <source>context exceeded: about {0} of {1}</source>
            <translation>Kontext überschritten: etwa {0} von {1}</translation>
        </message>
    </context>
    <context>
        <name>ContextPopover</name>
        <message>
            <source>Context</source>
            <translation>Kontext</translation>
        </message>
        <message>
            <source>Length of the context, in steps</source>
            <translation>Länge des Kontexts, in Stufen</translation>
        </message>
        <message>
            <source> tokens</source>
            <translation> Token</translation>
        </message>
        <message>
            <source>Length of the context</source>
            <translation>Länge des Kontexts</translation>
        </message>
        <message>
            <source>Reload model</source>
            <translation>Modell neu laden</translation>
        </message>
        <message>
            <source>Fold earlier turns into a summary</source>
            <translation>Frühere Nachrichten zusammenfassen</translation>
        </message>
        <message>
            <source>Leave out the oldest turns</source>
            <translation>Die ältesten Nachrichten weglassen</translation>
        </message>
        <message>
            <source>Length</source>
            <translation>Länge</translation>
        </message>
        <message>
            <source>About {0} of {1} tokens are used ({2}).</source>
            <translation>Etwa {0} von {1} Token sind belegt ({2}).</translation>
        </message>
        <message>
            <source>{0} of {1} tokens used ({2}).</source>
            <translation>{0} von {1} Token belegt ({2}).</translation>
        </message>
        <message>
            <source>There is no earlier answer to fold yet.</source>
            <translation>Es gibt noch keine frühere Antwort, die zusammengefasst werden könnte.</translation>
        </message>
        <message>
            <source>The length is set by {0}.</source>
            <translation>Die Länge wird durch {0} festgelegt.</translation>
        </message>
        <message>
            <source>Keys and values of {0} tokens take {1} of {2} ({3} each).</source>
            <translation>Keys und Values von {0} Token belegen {1} von {2} (je Token {3}).</translation>
        </message>
        <message>
            <source>That is more than is free now ({0}).</source>
            <translation>Das ist mehr, als jetzt frei ist ({0}).</translation>
        </message>
        <message>
            <source>The model is loaded with {0} tokens: the change needs it loaded again.</source>
            <translation>Das Modell ist mit {0} Token geladen: Für die Änderung muss es neu geladen werden.</translation>
        </message>
    </context>
    <context>
        <name>ConversationDelegate</name>
        <message>
            <source>New title</source>
            <translation>Neuer Titel</translation>
        </message>
    </context>
    <context>
        <name>ConversationPanel</name>
        <message>
            <source>Search chats</source>
            <translation>Chats durchsuchen</translation>
        </message>
        <message>
            <source>Folders, scratch chats, import and export</source>
            <translation>Ordner, temporäre Chats, Import und Export</translation>
        </message>
        <message>
            <source>More for chats</source>
            <translation>Mehr zu Chats</translation>
        </message>
        <message>
            <source>Chats</source>
            <translation>Chats</translation>
        </message>
        <message>
            <source>No chat contains these words.</source>
            <translation>Kein Chat enthält diese Wörter.</translation>
        </message>
        <message>
            <source>Rename	F2</source>
            <translation>Umbenennen	F2</translation>
        </message>
        <message>
            <source>Close for good	Del</source>
            <translation>Endgültig schließen	Entf</translation>
        </message>
        <message>
            <source>Unpin</source>
            <translation>Lösen</translation>
        </message>
        <message>
            <source>Pin to the top</source>
            <translation>Oben anheften</translation>
        </message>
        <message>
            <source>Export…</source>
            <translation>Exportieren…</translation>
        </message>
        <message>
            <source>Print…</source>
            <translation>Drucken…</translation>
        </message>
        <message>
            <source>Delete	Del</source>
            <translation>Löschen	Entf</translation>
        </message>
        <message>
            <source>Move to folder</source>
            <translation>In Ordner verschieben</translation>
        </message>
        <message>
            <source>No folder</source>
            <translation>Kein Ordner</translation>
        </message>
        <message>
            <source>New folder…</source>
            <translation>Neuer Ordner…</translation>
        </message>
        <message>
            <source>Collapse</source>
            <translation>Zuklappen</translation>
        </message>
        <message>
            <source>Expand</source>
            <translation>Aufklappen</translation>
        </message>
        <message>
            <source>Delete…	Del</source>
            <translation>Löschen…	Entf</translation>
        </message>
        <message>
            <source>New folder</source>
            <translation>Neuer Ordner</translation>
        </message>
        <message>
            <source>New scratch chat	Ctrl+Shift+N</source>
            <translation>Neuer temporärer Chat	Strg+Umschalt+N</translation>
        </message>
        <message>
            <source>Import chats…</source>
            <translation>Chats importieren…</translation>
        </message>
        <message>
            <source>Export chat…</source>
            <translation>Chat exportieren…</translation>
        </message>
        <message>
            <source>Print chat…</source>
            <translation>Chat drucken…</translation>
        </message>
        <message>
            <source>Export all chats…</source>
            <translation>Alle Chats exportieren…</translation>
        </message>
    </context>
    <context>
        <name>CopyButton</name>
        <message>
            <source>Copied</source>
            <translation>Kopiert</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>Kopieren</translation>
        </message>
        <message>
            <source>Copy code</source>
            <translation>Code kopieren</translation>
        </message>
    </context>
    <context>
        <name>CoreGrid</name>
        <message>
            <source>{0} CPUs, {1}% busy on average; busiest: number {2} with {3}%</source>
            <translation>{0} CPUs, im Mittel {1} % ausgelastet; am meisten Nummer {2} mit {3} %</translation>
        </message>
        <message>
            <source>CPU {0}: {1}% busy</source>
            <translation>CPU {0}: {1} % ausgelastet</translation>
        </message>
    </context>
    <context>
        <name>DataCard</name>
        <message>
            <source>Data</source>
            <translation>Daten</translation>
        </message>
        <message>
            <source>Open folder</source>
            <translation>Ordner öffnen</translation>
        </message>
        <message>
            <source>Change…</source>
            <translation>Ändern…</translation>
        </message>
        <message>
            <source>Data folder</source>
            <translation>Datenordner</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>Rückgängig</translation>
        </message>
        <message>
            <source>Folder for chats and models</source>
            <translation>Ordner für Chats und Modelle</translation>
        </message>
        <message>
            <source>Copy your chats and models to {0}?</source>
            <translation>Ihre Chats und Modelle nach {0} kopieren?</translation>
        </message>
        <message>
            <source>They are copied at the next start. The current folder stays until you delete it.</source>
            <translation>Sie werden beim nächsten Start kopiert. Der jetzige Ordner bleibt, bis Sie ihn löschen.</translation>
        </message>
        <message>
            <source>Copy them</source>
            <translation>Kopieren</translation>
        </message>
        <message>
            <source>Start empty</source>
            <translation>Leer beginnen</translation>
        </message>
        <message>
            <source>At the next start your chats and models are copied to {0}, which is then used.</source>
            <translation>Beim nächsten Start werden Ihre Chats und Modelle nach {0} kopiert; dann wird dieser Ordner verwendet.</translation>
        </message>
        <message>
            <source>The data in {0} is used from the next start.</source>
            <translation>Ab dem nächsten Start werden die Daten in {0} verwendet.</translation>
        </message>
    </context>
    <context>
        <name>DataFolder</name>
        <message>
            <source>{0} is inside the current data folder; choose a folder outside it.</source>
            <translation>{0} liegt innerhalb des jetzigen Datenordners; wählen Sie einen Ordner außerhalb.</translation>
        </message>
        <message>
            <source>{0} cannot be written to ({1}); choose another folder.</source>
            <translation>In {0} kann nicht geschrieben werden ({1}); wählen Sie einen anderen Ordner.</translation>
        </message>
        <message>
            <source>The data could not be copied to {0} ({1}); {2} stays in use.</source>
            <translation>Die Daten konnten nicht nach {0} kopiert werden ({1}); {2} bleibt in Gebrauch.</translation>
        </message>
        <message>
            <source>{0} has {1} free, but {2} are to be copied; {3} stays in use.</source>
            <translation>{0} hat {1} frei, aber {2} sind zu kopieren; {3} bleibt in Gebrauch.</translation>
        </message>
    </context>
    <context>
        <name>DataFolderStart</name>
        <message>
            <source>Copying chats and models to {0}…</source>
            <translation>Chats und Modelle werden nach {0} kopiert…</translation>
        </message>
        <message>
            <source>Keep the current folder</source>
            <translation>Jetzigen Ordner behalten</translation>
        </message>
        <message>
            <source>The data folder could not be changed.</source>
            <translation>Der Datenordner konnte nicht geändert werden.</translation>
        </message>
        <message>
            <source>The data folder {0} is missing.</source>
            <translation>Der Datenordner {0} fehlt.</translation>
        </message>
        <message>
            <source>Plug in its drive and try again, or continue with the default folder {0}.</source>
            <translation>Schließen Sie sein Laufwerk an und versuchen Sie es erneut, oder machen Sie mit dem Standardordner {0} weiter.</translation>
        </message>
        <message>
            <source>Try again</source>
            <translation>Erneut versuchen</translation>
        </message>
        <message>
            <source>Use the default folder</source>
            <translation>Standardordner verwenden</translation>
        </message>
        <message>
            <source>Quit</source>
            <translation>Beenden</translation>
        </message>
        <message>
            <source>Switchyard is already open with the data folder {0}, but does not respond. End it, in the system's task manager if necessary, and start again.</source>
            <translation>Switchyard ist mit dem Datenordner {0} schon geöffnet, reagiert aber nicht. Beenden Sie es, notfalls im Task-Manager des Systems, und starten Sie neu.</translation>
        </message>
        <message>
            <source>The data folder {0} cannot be written to; check its permissions and free space, then start again.</source>
            <translation>Im Datenordner {0} kann nicht geschrieben werden; prüfen Sie seine Berechtigungen und den freien Platz und starten Sie neu.</translation>
        </message>
        <message>
            <source>{0} is not a file, and Switchyard keeps one there: move it away, then start again.</source>
            <translation>{0} ist keine Datei, aber Switchyard legt dort eine ab: Verschieben Sie es und starten Sie neu.</translation>
        </message>
    </context>
    <context>
        <name>Diagnosis</name>
        <message>
            <source>The report could not be written to {0}: choose another folder.</source>
            <translation>Der Bericht konnte nicht nach {0} geschrieben werden: Wählen Sie einen anderen Ordner.</translation>
        </message>
    </context>
    <context>
        <name>Downloads</name>
        <message>
            <source>Downloads could not be started: reinstall Switchyard.</source>
            <translation>Downloads konnten nicht gestartet werden: Installieren Sie Switchyard neu.</translation>
        </message>
        <message>
            <source>The downloads stopped and could not be started again; try Resume.</source>
            <translation>Die Downloads wurden beendet und ließen sich nicht neu starten; versuchen Sie „Fortsetzen“.</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} von {1}</translation>
        </message>
        <message>
            <source>connecting</source>
            <translation>wird verbunden</translation>
        </message>
        <message>
            <source>{0} left</source>
            <translation>noch {0}</translation>
        </message>
        <message>
            <source>waits for its turn</source>
            <translation>wartet, bis es an der Reihe ist</translation>
        </message>
        <message>
            <source>paused</source>
            <translation>pausiert</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>fehlgeschlagen</translation>
        </message>
        <message>
            <source>done</source>
            <translation>fertig</translation>
        </message>
        <message>
            <source>{0} that are already here are deleted. To keep them, pause it instead.</source>
            <translation>{0}, die schon hier sind, werden gelöscht. Um sie zu behalten, pausieren Sie den Download.</translation>
        </message>
        <message>
            <source>Cancel the download of {0}?</source>
            <translation>Download von {0} abbrechen?</translation>
        </message>
        <message>
            <source>Cancel the download</source>
            <translation>Download abbrechen</translation>
        </message>
        <message>
            <source>Keep it</source>
            <translation>Behalten</translation>
        </message>
    </context>
    <context>
        <name>DownloadsCard</name>
        <message>
            <source>Downloads</source>
            <translation>Downloads</translation>
        </message>
        <message>
            <source>Speed limit</source>
            <translation>Tempolimit</translation>
        </message>
        <message>
            <source>at most {0}</source>
            <translation>höchstens {0}</translation>
        </message>
        <message>
            <source>no speed limit</source>
            <translation>kein Tempolimit</translation>
        </message>
        <message>
            <source>Pause</source>
            <translation>Pausieren</translation>
        </message>
        <message>
            <source>Resume</source>
            <translation>Fortsetzen</translation>
        </message>
        <message>
            <source>Access token…</source>
            <translation>Zugriffstoken…</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Abbrechen</translation>
        </message>
        <message>
            <source>Earlier (Alt+Up)</source>
            <translation>Früher (Alt+Auf)</translation>
        </message>
        <message>
            <source>Later (Alt+Down)</source>
            <translation>Später (Alt+Ab)</translation>
        </message>
    </context>
    <context>
        <name>DownloadsMark</name>
        <message>
            <source>Downloads</source>
            <translation>Downloads</translation>
        </message>
        <message>
            <source>1 download, {0}%</source>
            <translation>1 Download, {0} %</translation>
        </message>
        <message numerus="yes">
            <source>{0} downloads, {1}%</source>
            <translation>
                <numerusform>{0} Download, {1} %</numerusform>
                <numerusform>{0} Downloads, {1} %</numerusform>
            </translation>
        </message>
        <message>
            <source>A download stopped</source>
            <translation>Ein Download hielt an</translation>
        </message>
        <message>
            <source>{0}: show them</source>
            <translation>{0}: anzeigen</translation>
        </message>
    </context>
    <context>
        <name>DownloadsView</name>
        <message>
            <source>Downloads</source>
            <translation>Downloads</translation>
        </message>
        <message>
            <source>Pause or resume the download</source>
            <translation>Download pausieren oder fortsetzen</translation>
        </message>
        <message>
            <source>Download it earlier</source>
            <translation>Früher herunterladen</translation>
        </message>
        <message>
            <source>Download it later</source>
            <translation>Später herunterladen</translation>
        </message>
        <message>
            <source>Cancel the download</source>
            <translation>Download abbrechen</translation>
        </message>
    </context>
    <context>
        <name>EmptyBatch</name>
        <message>
            <source>Every row is answered, many at a time. The result file keeps the input's columns.</source>
            <translation>Jede Zeile wird beantwortet, viele auf einmal. Die Ergebnisdatei behält die Spalten der Eingabe.</translation>
        </message>
        <message>
            <source>Accepted: csv, tsv, jsonl, parquet, xlsx, txt, md, pdf, docx and html, a folder of such files, and OpenAI batch files.</source>
            <translation>Möglich sind csv, tsv, jsonl, parquet, xlsx, txt, md, pdf, docx und html, ein Ordner mit solchen Dateien und OpenAI-Batch-Dateien.</translation>
        </message>
        <message>
            <source>Choose a file…</source>
            <translation>Datei wählen…</translation>
        </message>
        <message>
            <source>Choose a folder…</source>
            <translation>Ordner wählen…</translation>
        </message>
        <message>
            <source>Drop a file of prompts here</source>
            <translation>Ziehen Sie eine Datei mit Prompts hierher</translation>
        </message>
    </context>
    <context>
        <name>EmptyChat</name>
        <message>
            <source>Ask something to begin</source>
            <translation>Stellen Sie eine erste Frage</translation>
        </message>
        <message>
            <source>Choose a model</source>
            <translation>Modell wählen</translation>
        </message>
        <message>
            <source>What is the capital of France? Answer in one sentence.</source>
            <translation>Was ist die Hauptstadt von Frankreich? Antworte in einem Satz.</translation>
        </message>
        <message>
            <source>Write one sentence about the sea.</source>
            <translation>Schreibe einen Satz über das Meer.</translation>
        </message>
        <message>
            <source>Why should we drink water? Answer in one sentence.</source>
            <translation>Warum sollten wir Wasser trinken? Antworte in einem Satz.</translation>
        </message>
        <message>
            <source>Why do people like music? Answer in one sentence.</source>
            <translation>Warum mögen Menschen Musik? Antworte in einem Satz.</translation>
        </message>
    </context>
    <context>
        <name>Engine</name>
        <message>
            <source>The graphics card limits the speed: it is busy {0} of the time, reading at {1} GB/s.</source>
            <translation>Die Grafikkarte begrenzt das Tempo: Sie ist {0} der Zeit beschäftigt und liest mit {1} GB/s.</translation>
        </message>
        <message>
            <source>The CPU limits the speed.</source>
            <translation>Die CPU begrenzt das Tempo.</translation>
        </message>
        <message>
            <source>Reading {0} from RAM limits the speed: the CPU is busy {1} of the time, at {2} GB/s.</source>
            <translation>Das Lesen aus dem RAM begrenzt das Tempo ({0}): Die CPU ist {1} der Zeit beschäftigt, mit {2} GB/s.</translation>
        </message>
        <message>
            <source>The link to the card limits the speed: it is busy {0} of the time, at {1} GB/s.</source>
            <translation>Die Verbindung zur Karte begrenzt das Tempo: Sie ist {0} der Zeit beschäftigt, mit {1} GB/s.</translation>
        </message>
        <message>
            <source>CPU arithmetic limits the speed: the CPU is busy {0} of the time, and computing experts takes longer than reading them from RAM.</source>
            <translation>Die Rechenleistung der CPU begrenzt das Tempo: Die CPU ist {0} der Zeit beschäftigt, und Experten zu berechnen dauert länger, als sie aus dem RAM zu lesen.</translation>
        </message>
        <message>
            <source>Launching many small operations on the card limits the speed: {0} ms of the {1} ms per token.</source>
            <translation>Das Starten vieler kleiner Operationen auf der Karte begrenzt das Tempo: {0} ms der {1} ms pro Token.</translation>
        </message>
        <message>
            <source>Layers are read for each token: rows of a file share that, and gain most.</source>
            <translation>Schichten werden für jedes Token gelesen: Zeilen einer Datei teilen sich das und gewinnen am meisten.</translation>
        </message>
        <message>
            <source>No single change of memory, link, disk or precision would make a noticeable difference.</source>
            <translation>Keine einzelne Änderung an Speicher, Verbindung, Datenträger oder Genauigkeit würde spürbar etwas bringen.</translation>
        </message>
        <message>
            <source>{0} would help most: {1} tokens/s, {2} times as fast with the prompt included.</source>
            <translation>{0} würde am meisten helfen: {1} Token/s, mit dem Prompt {2}-mal so schnell.</translation>
        </message>
        <message>
            <source>{0} would help most: {1} tokens/s, about {2} times as fast.</source>
            <translation>{0} würde am meisten helfen: {1} Token/s, etwa {2}-mal so schnell.</translation>
        </message>
        <message>
            <source>{0} GB of RAM</source>
            <translation>{0} GB RAM</translation>
        </message>
        <message>
            <source>A card with {0} GB</source>
            <translation>Eine Karte mit {0} GB</translation>
        </message>
        <message>
            <source>A link to the card that is twice as fast</source>
            <translation>Eine doppelt so schnelle Verbindung zur Karte</translation>
        </message>
        <message>
            <source>A disk that is twice as fast</source>
            <translation>Ein doppelt so schneller Datenträger</translation>
        </message>
        <message>
            <source>RAM that is twice as fast</source>
            <translation>Doppelt so schneller RAM</translation>
        </message>
        <message>
            <source>All {0} threads</source>
            <translation>Alle {0} Threads</translation>
        </message>
        <message>
            <source>expert weights</source>
            <translation>Gewichte der Experten</translation>
        </message>
        <message>
            <source>as stored ({0}-bit)</source>
            <translation>wie gespeichert ({0} Bit)</translation>
        </message>
        <message>
            <source>as stored ({0}-bit and {1}-bit)</source>
            <translation>wie gespeichert ({0} und {1} Bit)</translation>
        </message>
        <message>
            <source>as stored ({0}-bit, {1}-bit and {2}-bit)</source>
            <translation>wie gespeichert ({0}, {1} und {2} Bit)</translation>
        </message>
        <message>
            <source>Switchyard mixed</source>
            <translation>Switchyard gemischt</translation>
        </message>
        <message>
            <source>Switchyard mixed, static</source>
            <translation>Switchyard gemischt, fest</translation>
        </message>
        <message>
            <source>Switchyard mixed, predicted</source>
            <translation>Switchyard gemischt, mit Vorhersage</translation>
        </message>
        <message>
            <source>Switchyard, misses on the CPU</source>
            <translation>Switchyard, Fehlendes auf der CPU</translation>
        </message>
        <message>
            <source>CPU only</source>
            <translation>nur CPU</translation>
        </message>
        <message>
            <source>CPU experts</source>
            <translation>Experten auf der CPU</translation>
        </message>
        <message>
            <source>on-demand</source>
            <translation>bei Bedarf</translation>
        </message>
        <message>
            <source>whole-layer prefetch</source>
            <translation>ganze Schichten im Voraus</translation>
        </message>
        <message>
            <source>the other weights and the KV cache</source>
            <translation>die anderen Gewichte und der KV-Cache</translation>
        </message>
        <message>
            <source>the weights and the KV cache</source>
            <translation>die Gewichte und der KV-Cache</translation>
        </message>
        <message>
            <source>From now on: {0}, {1} tokens/s.</source>
            <translation>Von nun an: {0}, {1} Token/s.</translation>
        </message>
        <message>
            <source>Before: {0} tokens/s, so {1} times.</source>
            <translation>Vorher: {0} Token/s, also {1}-mal so schnell.</translation>
        </message>
        <message>
            <source>Before, it could not run.</source>
            <translation>Vorher lief es nicht.</translation>
        </message>
        <message>
            <source>The settings stay the same: {0} tokens/s, and nothing else is better.</source>
            <translation>Die Einstellungen bleiben: {0} Token/s, und nichts anderes ist besser.</translation>
        </message>
        <message>
            <source>{0} did not answer within {1} seconds.</source>
            <translation>{0} antwortete nicht innerhalb von {1} Sekunden.</translation>
        </message>
        <message>
            <source>{0} did not speak MCP within {1} seconds of its start: check its command or address.</source>
            <translation>{0} sprach innerhalb von {1} Sekunden nach dem Start kein MCP: Prüfen Sie Befehl oder Adresse.</translation>
        </message>
        <message>
            <source>{0} ended in the middle of it.</source>
            <translation>{0} endete mittendrin.</translation>
        </message>
        <message>
            <source>{0} sent more than {1} MB at once, and was stopped.</source>
            <translation>{0} sendete mehr als {1} MB auf einmal und wurde angehalten.</translation>
        </message>
        <message>
            <source>{0} could not be started ({1}): check its command.</source>
            <translation>{0} konnte nicht gestartet werden ({1}): Prüfen Sie den Befehl.</translation>
        </message>
        <message>
            <source>{0} ended, or does not speak MCP.</source>
            <translation>{0} wurde beendet oder spricht kein MCP.</translation>
        </message>
        <message>
            <source>{0} ended, or does not speak MCP. It wrote: {1}</source>
            <translation>{0} wurde beendet oder spricht kein MCP. Es schrieb: {1}</translation>
        </message>
        <message>
            <source>Give the server a name.</source>
            <translation>Geben Sie dem Server einen Namen.</translation>
        </message>
        <message>
            <source>{0} needs either a command or an address: enter one of them.</source>
            <translation>{0} braucht entweder einen Befehl oder eine Adresse: Geben Sie eins davon ein.</translation>
        </message>
        <message>
            <source>This is not JSON ({0}): paste the whole block.</source>
            <translation>Das ist kein JSON ({0}): Fügen Sie den ganzen Block ein.</translation>
        </message>
        <message>
            <source>The user did not allow this call.</source>
            <translation>Dieser Aufruf wurde nicht erlaubt.</translation>
        </message>
        <message>
            <source>There is no tool of this name.</source>
            <translation>Ein Werkzeug dieses Namens gibt es nicht.</translation>
        </message>
        <message>
            <source>The expression divides by zero.</source>
            <translation>Der Ausdruck teilt durch null.</translation>
        </message>
        <message>
            <source>No folder is attached to this chat: attach one first.</source>
            <translation>Diesem Chat ist kein Ordner angehängt: Hängen Sie zuerst einen an.</translation>
        </message>
        <message>
            <source>{0} was removed or is off.</source>
            <translation>{0} wurde entfernt oder ist aus.</translation>
        </message>
        <message>
            <source>The process with the tools ended.</source>
            <translation>Der Prozess mit den Werkzeugen wurde beendet.</translation>
        </message>
        <message>
            <source>The process with the tools could not be started.</source>
            <translation>Der Prozess mit den Werkzeugen konnte nicht gestartet werden.</translation>
        </message>
        <message>
            <source>The tools did not respond, and were stopped.</source>
            <translation>Die Werkzeuge reagierten nicht und wurden angehalten.</translation>
        </message>
        <message>
            <source>The call was stopped.</source>
            <translation>Der Aufruf wurde angehalten.</translation>
        </message>
        <message>
            <source>The arguments are no JSON object.</source>
            <translation>Die Argumente sind kein JSON-Objekt.</translation>
        </message>
        <message>
            <source>{0} was called with the same arguments {1} times: no more calls, answer now.</source>
            <translation>{0} wurde {1}-mal mit denselben Argumenten aufgerufen: keine weiteren Aufrufe, jetzt antworten.</translation>
        </message>
        <message>
            <source>Tools were called {0} times in a row: no more calls, answer now.</source>
            <translation>Werkzeuge wurden {0}-mal nacheinander aufgerufen: keine weiteren Aufrufe, jetzt antworten.</translation>
        </message>
        <message>
            <source>More than {0} tools were called at once: no more calls, answer now.</source>
            <translation>Mehr als {0} Werkzeuge wurden auf einmal aufgerufen: keine weiteren Aufrufe, jetzt antworten.</translation>
        </message>
        <message>
            <source>{0} has no command and no address: enter one of them.</source>
            <translation>{0} hat weder einen Befehl noch eine Adresse: Geben Sie eins davon ein.</translation>
        </message>
        <message>
            <source>The address of {0} does not begin with http:// or https://: correct it.</source>
            <translation>Die Adresse von {0} beginnt nicht mit http:// oder https://: Berichtigen Sie sie.</translation>
        </message>
        <message>
            <source>The arguments of {0} are not a list of texts: correct them.</source>
            <translation>Die Argumente von {0} sind keine Liste von Texten: Berichtigen Sie sie.</translation>
        </message>
        <message>
            <source>The command of {0} has a character that no command can have: correct it.</source>
            <translation>Der Befehl von {0} enthält ein Zeichen, das kein Befehl haben kann: Berichtigen Sie ihn.</translation>
        </message>
        <message>
            <source>The variables or headers of {0} are not names with texts: correct them.</source>
            <translation>Die Variablen oder Header von {0} sind keine Namen mit Texten: Berichtigen Sie sie.</translation>
        </message>
        <message>
            <source>No servers are in it: it needs "mcpServers" with a name for each.</source>
            <translation>Es enthält keine Server: Nötig ist „mcpServers“ mit einem Namen für jeden.</translation>
        </message>
        <message>
            <source>{0} servers are too many: up to {1} can be added.</source>
            <translation>{0} Server sind zu viele: Bis zu {1} können hinzugefügt werden.</translation>
        </message>
        <message>
            <source>{0} needs its {1} again, which was kept for one run only: edit the server.</source>
            <translation>{0} braucht {1} noch einmal, da es nur bis zum Beenden galt: Bearbeiten Sie den Server.</translation>
        </message>
        <message>
            <source>{0} needs {1} in the environment, where it is not set: set it.</source>
            <translation>{0} braucht {1} in der Umgebung, wo es nicht gesetzt ist: Setzen Sie es.</translation>
        </message>
        <message>
            <source>No documents are attached to this chat.</source>
            <translation>Diesem Chat sind keine Dokumente angehängt.</translation>
        </message>
        <message>
            <source>There is no tool named {0}.</source>
            <translation>Ein Werkzeug namens {0} gibt es nicht.</translation>
        </message>
        <message>
            <source>A batch has a prompt and 1 to {0} rows.</source>
            <translation>Ein Batch hat einen Prompt und 1 bis {0} Zeilen.</translation>
        </message>
        <message>
            <source>The rows cannot be written to {0} ({1}).</source>
            <translation>Die Zeilen können nicht nach {0} geschrieben werden ({1}).</translation>
        </message>
        <message>
            <source>The file {0} cannot be read ({1}).</source>
            <translation>Die Datei {0} kann nicht gelesen werden ({1}).</translation>
        </message>
        <message>
            <source>The file {0} is no text.</source>
            <translation>Die Datei {0} ist kein Text.</translation>
        </message>
        <message>
            <source>No attached folder has a file {0}.</source>
            <translation>Kein angehängter Ordner hat eine Datei {0}.</translation>
        </message>
        <message>
            <source>The result has too many digits.</source>
            <translation>Das Ergebnis hat zu viele Stellen.</translation>
        </message>
        <message>
            <source>The result is no real number.</source>
            <translation>Das Ergebnis ist keine reelle Zahl.</translation>
        </message>
        <message>
            <source>A factorial is of a whole number from 0 to 1000.</source>
            <translation>Eine Fakultät gibt es von einer ganzen Zahl von 0 bis 1000.</translation>
        </message>
        <message>
            <source>An expression has 1 to {0} characters.</source>
            <translation>Ein Ausdruck hat 1 bis {0} Zeichen.</translation>
        </message>
        <message>
            <source>The expression cannot be read ({0}).</source>
            <translation>Der Ausdruck ist nicht lesbar ({0}).</translation>
        </message>
        <message>
            <source>The expression cannot be computed ({0}).</source>
            <translation>Der Ausdruck kann nicht berechnet werden ({0}).</translation>
        </message>
        <message>
            <source>Only numbers, + - * / // % **, and functions such as sqrt, log, sin and round are computed.</source>
            <translation>Nur Zahlen, + - * / // % ** und Funktionen wie sqrt, log, sin und round werden berechnet.</translation>
        </message>
        <message>
            <source>The starter model is not on this machine yet.</source>
            <translation>Das Startmodell ist noch nicht auf diesem Rechner.</translation>
        </message>
        <message>
            <source>There is no file {0}: check the path.</source>
            <translation>Es gibt keine Datei {0}: Prüfen Sie den Pfad.</translation>
        </message>
        <message>
            <source>There is no folder {0}: check the path.</source>
            <translation>Es gibt keinen Ordner {0}: Prüfen Sie den Pfad.</translation>
        </message>
        <message>
            <source>There is no model at {0}: check the path.</source>
            <translation>Unter {0} gibt es kein Modell: Prüfen Sie den Pfad.</translation>
        </message>
        <message>
            <source>{0} is not a folder: check the path.</source>
            <translation>{0} ist kein Ordner: Prüfen Sie den Pfad.</translation>
        </message>
        <message>
            <source>{0} cannot be read ({1}): check the path.</source>
            <translation>{0} kann nicht gelesen werden ({1}): Prüfen Sie den Pfad.</translation>
        </message>
        <message>
            <source>{0} cannot be read ({1}): download or copy the model again.</source>
            <translation>{0} kann nicht gelesen werden ({1}): Laden oder kopieren Sie das Modell erneut.</translation>
        </message>
        <message>
            <source>{0} has no {1}, so it is not a complete model: download or copy it again.</source>
            <translation>{0} fehlt {1}, es ist also kein vollständiges Modell: Laden oder kopieren Sie es erneut.</translation>
        </message>
        <message>
            <source>{0} is a pickle file, which can run code when opened, so Switchyard never loads one: use the model's safetensors version.</source>
            <translation>{0} ist eine Pickle-Datei, die beim Öffnen Code ausführen kann; Switchyard lädt solche nie: Verwenden Sie die safetensors-Version des Modells.</translation>
        </message>
        <message>
            <source>{0} is in use: unload it in Switchyard's window, end other programs with it, and try again.</source>
            <translation>{0} wird gerade verwendet: Entladen Sie es im Fenster von Switchyard, beenden Sie andere Programme damit und versuchen Sie es erneut.</translation>
        </message>
        <message>
            <source>{0} is being moved or removed: wait until that is done.</source>
            <translation>{0} wird gerade verschoben oder entfernt: Warten Sie, bis das erledigt ist.</translation>
        </message>
        <message>
            <source>{0} exists already: choose another name.</source>
            <translation>{0} ist bereits vorhanden: Wählen Sie einen anderen Namen.</translation>
        </message>
        <message>
            <source>{0} is already in the library.</source>
            <translation>{0} ist schon in der Bibliothek.</translation>
        </message>
        <message>
            <source>The model folder {0} is not there: connect its disk, or take the folder off the list.</source>
            <translation>Der Modellordner {0} ist nicht da: Schließen Sie seinen Datenträger an oder nehmen Sie den Ordner aus der Liste.</translation>
        </message>
        <message>
            <source>The disk of {0} is full: make room and try again.</source>
            <translation>Der Datenträger von {0} ist voll: Schaffen Sie Platz und versuchen Sie es erneut.</translation>
        </message>
        <message>
            <source>The disk of {0} is full: make room and let the download go on; nothing is lost.</source>
            <translation>Der Datenträger von {0} ist voll: Schaffen Sie Platz und setzen Sie den Download fort; nichts ist verloren.</translation>
        </message>
        <message>
            <source>The disk of {0} is full: free some space, and the job continues.</source>
            <translation>Der Datenträger von {0} ist voll: Geben Sie Platz frei, dann geht der Auftrag weiter.</translation>
        </message>
        <message>
            <source>Cannot read or write {0} ({1}): check its permissions and the disk.</source>
            <translation>{0} kann nicht gelesen oder geschrieben werden ({1}): Prüfen Sie die Berechtigungen und den Datenträger.</translation>
        </message>
        <message>
            <source>{0} needs {1} of RAM{2}, but only {3} are free: close other programs or choose a smaller model.</source>
            <translation>{0} braucht {1} RAM{2}, aber nur {3} sind frei: Schließen Sie andere Programme oder wählen Sie ein kleineres Modell.</translation>
        </message>
        <message>
            <source>{0} needs {1} of RAM{2}, more than the {3} that the RAM budget allows: raise the budget or choose a smaller model.</source>
            <translation>{0} braucht {1} RAM{2}, mehr als die {3}, die das RAM-Budget erlaubt: Erhöhen Sie das Budget oder wählen Sie ein kleineres Modell.</translation>
        </message>
        <message>
            <source>{0} ran out of memory: close other programs, or allow the model less memory or a shorter context.</source>
            <translation>{0} hat keinen Speicher mehr: Schließen Sie andere Programme oder geben Sie dem Modell weniger Speicher oder einen kürzeren Kontext.</translation>
        </message>
        <message>
            <source>{0} has no graphics card: choose one first.</source>
            <translation>{0} hat keine Grafikkarte: Wählen Sie zuerst eine.</translation>
        </message>
        <message>
            <source>The graphics card stopped responding, so the model runs on the CPU now.</source>
            <translation>Die Grafikkarte reagiert nicht mehr, daher läuft das Modell jetzt auf der CPU.</translation>
        </message>
        <message>
            <source>The NVIDIA driver does not respond: restart the computer, or update the driver.</source>
            <translation>Der NVIDIA-Treiber reagiert nicht: Starten Sie den Computer neu oder aktualisieren Sie den Treiber.</translation>
        </message>
        <message>
            <source>No NVIDIA driver was found.</source>
            <translation>Es wurde kein NVIDIA-Treiber gefunden.</translation>
        </message>
        <message>
            <source>The {0} was {1} and is now {2}.</source>
            <translation>Geändert hat sich: {0}, bisher {1}, jetzt {2}.</translation>
        </message>
        <message>
            <source>The prompt is {0} tokens long, but this model holds {1} together with the answer: shorten it by {2} tokens, or start a new chat.</source>
            <translation>Der Prompt ist {0} Token lang, aber dieses Modell fasst mit der Antwort zusammen {1}: Kürzen Sie ihn um {2} Token oder beginnen Sie einen neuen Chat.</translation>
        </message>
        <message>
            <source>No model is loaded: choose one first.</source>
            <translation>Kein Modell ist geladen: Wählen Sie zuerst eines.</translation>
        </message>
        <message>
            <source>There was not enough memory to choose this answer's next token: close other programs and ask again.</source>
            <translation>Der Speicher reichte nicht, um das nächste Token dieser Antwort zu wählen: Schließen Sie andere Programme und fragen Sie erneut.</translation>
        </message>
        <message>
            <source>Could not read {0} from {1} ({2}): check the network; models on this PC still work.</source>
            <translation>{0} konnte nicht von {1} gelesen werden ({2}): Prüfen Sie das Netzwerk; Modelle auf diesem PC funktionieren weiter.</translation>
        </message>
        <message>
            <source>{0} cannot be reached: waiting for the network.</source>
            <translation>{0} ist nicht erreichbar: Auf das Netzwerk wird gewartet.</translation>
        </message>
        <message>
            <source>The connection to {0} broke: trying again.</source>
            <translation>Die Verbindung zu {0} brach ab: Neuer Versuch läuft.</translation>
        </message>
        <message>
            <source>{0} sends nothing: waiting.</source>
            <translation>{0} sendet nichts: Es wird gewartet.</translation>
        </message>
        <message>
            <source>{0} gives {1} only to those it knows: enter an access token of an account that may read it.</source>
            <translation>{0} gibt {1} nur an Bekannte heraus: Geben Sie ein Zugriffstoken eines Kontos ein, das es lesen darf.</translation>
        </message>
        <message>
            <source>{0} got too many requests from here: try again {1}.</source>
            <translation>{0} hat von hier zu viele Anfragen erhalten: Versuchen Sie es später erneut ({1}).</translation>
        </message>
        <message>
            <source>{0} gave no answer ({1}): check that the server runs, and the network.</source>
            <translation>{0} hat nicht geantwortet ({1}): Prüfen Sie, ob der Server läuft, und das Netzwerk.</translation>
        </message>
        <message>
            <source>There is no server with OpenAI's interface at {0} ({1}): check the address.</source>
            <translation>Unter {0} gibt es keinen Server mit der Schnittstelle von OpenAI ({1}): Prüfen Sie die Adresse.</translation>
        </message>
        <message>
            <source>{0} is not an address of a server: it must begin with http:// or https://.</source>
            <translation>{0} ist keine Serveradresse: Sie muss mit http:// oder https:// beginnen.</translation>
        </message>
        <message>
            <source>{0} is not an address: enter one such as http://10.0.0.5:8000/v1.</source>
            <translation>{0} ist keine Adresse: Geben Sie eine ein wie http://10.0.0.5:8000/v1.</translation>
        </message>
        <message>
            <source>There is an endpoint called {0} already, or nearly so: choose another name.</source>
            <translation>Einen Server namens {0} gibt es schon, oder fast so: Wählen Sie einen anderen Namen.</translation>
        </message>
        <message>
            <source>This is not a key: copy it again, in one piece and without spaces.</source>
            <translation>Das ist kein Schlüssel: Kopieren Sie ihn noch einmal, am Stück und ohne Leerzeichen.</translation>
        </message>
        <message>
            <source>This is not a token: copy it again from the hub's settings page, in one piece.</source>
            <translation>Das ist kein Token: Kopieren Sie es noch einmal von der Einstellungsseite des Hubs, am Stück.</translation>
        </message>
        <message>
            <source>This file holds no certificate in PEM.</source>
            <translation>Diese Datei enthält kein Zertifikat im PEM-Format.</translation>
        </message>
        <message>
            <source>{0} has no rows: there is nothing to answer.</source>
            <translation>{0} hat keine Zeilen: Es gibt nichts zu beantworten.</translation>
        </message>
        <message>
            <source>{0} cannot be written ({1}): choose another output.</source>
            <translation>{0} kann nicht geschrieben werden ({1}): Wählen Sie eine andere Ausgabe.</translation>
        </message>
        <message>
            <source>{0} is within the input: choose another output.</source>
            <translation>{0} liegt innerhalb der Eingabe: Wählen Sie eine andere Ausgabe.</translation>
        </message>
        <message>
            <source>{0} is protected by a password or is an old .xls: save it as .xlsx without a password.</source>
            <translation>{0} ist durch ein Passwort geschützt oder eine alte .xls-Datei: Speichern Sie sie als .xlsx ohne Passwort.</translation>
        </message>
        <message>
            <source>Another run is working on the job of {0}: wait for it or stop it first.</source>
            <translation>Ein anderer Lauf arbeitet am Auftrag von {0}: Warten Sie darauf oder stoppen Sie ihn zuerst.</translation>
        </message>
        <message>
            <source>{0} was stopped.</source>
            <translation>{0} wurde angehalten.</translation>
        </message>
        <message>
            <source>{0} failed: {1}.</source>
            <translation>{0} ist gescheitert: {1}.</translation>
        </message>
    </context>
    <context>
        <name>EngineCard</name>
        <message>
            <source>First, the engine</source>
            <translation>Zuerst die Engine</translation>
        </message>
        <message>
            <source>Progress of the engine</source>
            <translation>Fortschritt der Engine</translation>
        </message>
        <message>
            <source>Get the engine and the starter</source>
            <translation>Engine und Startmodell holen</translation>
        </message>
        <message>
            <source>Engine only</source>
            <translation>Nur die Engine</translation>
        </message>
        <message>
            <source>Resume</source>
            <translation>Fortsetzen</translation>
        </message>
        <message>
            <source>Try again</source>
            <translation>Erneut versuchen</translation>
        </message>
        <message>
            <source>Pause</source>
            <translation>Pausieren</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Abbrechen</translation>
        </message>
        <message>
            <source>Use a file…</source>
            <translation>Datei verwenden…</translation>
        </message>
        <message>
            <source>For a computer without a network: files that another computer has fetched</source>
            <translation>Für Computer ohne Netz: Dateien, die ein anderer Computer geholt hat</translation>
        </message>
        <message>
            <source>Mirror and proxy…</source>
            <translation>Spiegelserver und Proxy…</translation>
        </message>
        <message>
            <source>The engine's files (*.zip *.whl)</source>
            <translation>Dateien der Engine (*.zip *.whl)</translation>
        </message>
        <message>
            <source>The engine's files</source>
            <translation>Dateien der Engine</translation>
        </message>
    </context>
    <context>
        <name>EngineClient</name>
        <message>
            <source>The engine was restarted before this request was done.</source>
            <translation>Die Engine wurde neu gestartet, bevor diese Anfrage fertig war.</translation>
        </message>
        <message>
            <source>The engine is not running; start it first.</source>
            <translation>Die Engine läuft nicht; starten Sie sie zuerst.</translation>
        </message>
        <message>
            <source>The engine uses protocol version {0} and this window version {1}: two installations are mixed, so reinstall Switchyard.</source>
            <translation>Die Engine verwendet die Protokollversion {0}, dieses Fenster die Version {1}: Zwei Installationen sind vermischt; installieren Sie Switchyard neu.</translation>
        </message>
        <message>
            <source>The engine was stopped before this request was done.</source>
            <translation>Die Engine wurde beendet, bevor diese Anfrage fertig war.</translation>
        </message>
        <message>
            <source>The engine has not responded for {0} seconds: wait, or restart it.</source>
            <translation>Die Engine reagiert seit {0} Sekunden nicht: Warten Sie, oder starten Sie sie neu.</translation>
        </message>
        <message>
            <source>A file of {0} became shorter, or its disk failed, while it was in use. Put the whole file back, then restart the engine.</source>
            <translation>Eine Datei von {0} wurde während der Benutzung kürzer, oder ihr Laufwerk ist ausgefallen. Stellen Sie die vollständige Datei wieder her und starten Sie dann die Engine neu.</translation>
        </message>
        <message>
            <source>The engine exited unexpectedly (code {0}); see its log for details.</source>
            <translation>Die Engine wurde unerwartet beendet (Code {0}); Einzelheiten stehen in ihrem Protokoll.</translation>
        </message>
        <message>
            <source>The engine crashed (status {0}).</source>
            <translation>Die Engine ist abgestürzt (Status {0}).</translation>
        </message>
        <message>
            <source>The engine was killed (signal 9), perhaps for lack of memory.</source>
            <translation>Die Engine wurde vom System beendet (Signal 9), vielleicht aus Speichermangel.</translation>
        </message>
        <message>
            <source>The engine crashed (signal 4): this processor lacks an instruction that it used.</source>
            <translation>Die Engine ist abgestürzt (Signal 4): Diesem Prozessor fehlt ein Befehl, den sie benutzt hat.</translation>
        </message>
        <message>
            <source>The engine crashed (signal {0}: {1}).</source>
            <translation>Die Engine ist abgestürzt (Signal {0}: {1}).</translation>
        </message>
    </context>
    <context>
        <name>EnginePart</name>
        <message>
            <source>The installation was stopped. Nothing is lost: try again.</source>
            <translation>Die Installation wurde angehalten. Nichts ist verloren: Versuchen Sie es erneut.</translation>
        </message>
    </context>
    <context>
        <name>ExpertCard</name>
        <message>
            <source>Expert map</source>
            <translation>Expertenkarte</translation>
        </message>
        <message>
            <source>A model like this has many small parts in each layer, called experts, and every token uses only a few of them. Each square is one expert: the stronger its colour, the more it is used; its pattern shows where it is stored.</source>
            <translation>Ein solches Modell hat in jeder Schicht viele kleine Teile, Experten genannt, und jedes Token nutzt nur einige davon. Jedes Quadrat ist ein Experte: je kräftiger die Farbe, desto öfter wird er genutzt; das Muster zeigt, wo er liegt.</translation>
        </message>
        <message>
            <source>By use</source>
            <translation>Nach Nutzung</translation>
        </message>
        <message>
            <source>Sort each layer's experts by use instead of by number</source>
            <translation>Experten jeder Schicht nach Nutzung statt nach Nummer sortieren</translation>
        </message>
        <message>
            <source>Table</source>
            <translation>Tabelle</translation>
        </message>
        <message>
            <source>The same experts as numbers, sorted by any column</source>
            <translation>Dieselben Experten als Zahlen, nach jeder Spalte sortierbar</translation>
        </message>
        <message>
            <source>Show the experts as a table</source>
            <translation>Experten als Tabelle zeigen</translation>
        </message>
        <message>
            <source>Time in the recorded session</source>
            <translation>Zeit in der aufgezeichneten Sitzung</translation>
        </message>
        <message>
            <source>Scrubs through the session's maps</source>
            <translation>Blättert durch die Karten der Sitzung</translation>
        </message>
        <message>
            <source>Load a model with experts and ask something: each square is an expert.</source>
            <translation>Laden Sie ein Modell mit Experten und fragen Sie etwas: Jedes Quadrat ist ein Experte.</translation>
        </message>
        <message>
            <source>{0} × {1}</source>
            <translation>{0} × {1}</translation>
        </message>
        <message>
            <source>{0} layers with {1} experts each</source>
            <translation>{0} Schichten mit je {1} Experten</translation>
        </message>
        <message>
            <source>Experts as a table</source>
            <translation>Experten als Tabelle</translation>
        </message>
    </context>
    <context>
        <name>ExpertMap</name>
        <message>
            <source>in VRAM</source>
            <translation>im VRAM</translation>
        </message>
        <message>
            <source>fetching</source>
            <translation>wird geholt</translation>
        </message>
        <message>
            <source>in RAM</source>
            <translation>im RAM</translation>
        </message>
        <message>
            <source>on disk</source>
            <translation>auf dem Datenträger</translation>
        </message>
    </context>
    <context>
        <name>ExpertMapView</name>
        <message>
            <source>Expert map</source>
            <translation>Expertenkarte</translation>
        </message>
        <message>
            <source>Layers by experts. Arrow keys move from expert to expert.</source>
            <translation>Schichten mal Experten. Die Pfeiltasten gehen von Experte zu Experte.</translation>
        </message>
        <message>
            <source>Layer {0}, expert {1}</source>
            <translation>Schicht {0}, Experte {1}</translation>
        </message>
        <message>
            <source>used {0} times</source>
            <translation>{0}-mal genutzt</translation>
        </message>
        <message>
            <source>hit {0}%</source>
            <translation>Treffer {0} %</translation>
        </message>
        <message>
            <source>never used</source>
            <translation>nie genutzt</translation>
        </message>
        <message>
            <source>last {0} steps ago</source>
            <translation>zuletzt vor {0} Schritten</translation>
        </message>
    </context>
    <context>
        <name>ExpertTable</name>
        <message>
            <source>Layer</source>
            <translation>Schicht</translation>
        </message>
        <message>
            <source>Expert</source>
            <translation>Experte</translation>
        </message>
        <message>
            <source>Uses</source>
            <translation>Nutzungen</translation>
        </message>
        <message>
            <source>Hits</source>
            <translation>Treffer</translation>
        </message>
        <message>
            <source>Steps ago</source>
            <translation>Vor Schritten</translation>
        </message>
        <message>
            <source>Size</source>
            <translation>Größe</translation>
        </message>
        <message>
            <source>Where</source>
            <translation>Ort</translation>
        </message>
    </context>
    <context>
        <name>ExportButton</name>
        <message>
            <source>Export</source>
            <translation>Exportieren</translation>
        </message>
        <message>
            <source>Contains no text of prompts or answers</source>
            <translation>Enthält keinen Text aus Prompts oder Antworten</translation>
        </message>
        <message>
            <source>Trace for Perfetto and Chrome (JSON)…</source>
            <translation>Trace für Perfetto und Chrome (JSON)…</translation>
        </message>
        <message>
            <source>Tables of spans and steps (CSV)…</source>
            <translation>Tabellen der Abschnitte und Schritte (CSV)…</translation>
        </message>
        <message>
            <source>Picture (PNG)…</source>
            <translation>Bild (PNG)…</translation>
        </message>
        <message>
            <source>Drawing (SVG)…</source>
            <translation>Zeichnung (SVG)…</translation>
        </message>
        <message>
            <source>Nothing to export yet: ask something in Chat first.</source>
            <translation>Noch nichts zu exportieren: Fragen Sie zuerst etwas im Chat.</translation>
        </message>
        <message>
            <source>{0} spans written to {1}</source>
            <translation>{0} Abschnitte in {1} gespeichert</translation>
        </message>
        <message>
            <source>Written to {0}</source>
            <translation>Gespeichert in {0}</translation>
        </message>
        <message>
            <source>{0} could not be written; choose another folder.</source>
            <translation>{0} konnte nicht geschrieben werden; wählen Sie einen anderen Ordner.</translation>
        </message>
        <message>
            <source>{0} could not be written ({1}); choose another folder.</source>
            <translation>{0} konnte nicht geschrieben werden ({1}); wählen Sie einen anderen Ordner.</translation>
        </message>
    </context>
    <context>
        <name>FindBar</name>
        <message>
            <source>Find in this chat</source>
            <translation>In diesem Chat suchen</translation>
        </message>
        <message>
            <source>Previous match  Shift+F3</source>
            <translation>Vorherige Fundstelle  Umschalt+F3</translation>
        </message>
        <message>
            <source>Next match  F3</source>
            <translation>Nächste Fundstelle  F3</translation>
        </message>
        <message>
            <source>Close  Esc</source>
            <translation>Schließen  Esc</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} von {1}</translation>
        </message>
        <message>
            <source>looking…</source>
            <translation>wird gesucht…</translation>
        </message>
        <message>
            <source>not in this chat</source>
            <translation>nicht in diesem Chat</translation>
        </message>
    </context>
    <context>
        <name>FirstRun</name>
        <message>
            <source>{0} with {1}</source>
            <translation>{0} mit {1}</translation>
        </message>
        <message>
            <source>1 core</source>
            <translation>1 Kern</translation>
        </message>
        <message numerus="yes">
            <source>{0} cores</source>
            <translation>
                <numerusform>{0} Kern</numerusform>
                <numerusform>{0} Kerne</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} of RAM, {1}</source>
            <translation>{0} RAM, {1}</translation>
        </message>
        <message>
            <source>{0} free on the disk for models</source>
            <translation>{0} frei für Modelle</translation>
        </message>
        <message>
            <source>Models of up to about {0} run from memory; parts of larger ones are read from the disk as they answer, which takes longer.</source>
            <translation>Modelle bis etwa {0} laufen aus dem Speicher; von größeren werden beim Antworten Teile vom Datenträger gelesen, was länger dauert.</translation>
        </message>
        <message>
            <source>This processor has no AVX2: everything works, but takes several times as long.</source>
            <translation>Dieser Prozessor hat kein AVX2: Alles funktioniert, dauert aber ein Mehrfaches.</translation>
        </message>
        <message>
            <source>Graphics card and processor share the work.</source>
            <translation>Grafikkarte und Prozessor teilen sich die Arbeit.</translation>
        </message>
        <message>
            <source>The graphics card cannot be used here: the processor does the work.</source>
            <translation>Die Grafikkarte kann hier nicht genutzt werden: Der Prozessor übernimmt die Arbeit.</translation>
        </message>
        <message>
            <source>There is no graphics card for models: the processor does the work.</source>
            <translation>Es gibt keine Grafikkarte für Modelle: Der Prozessor übernimmt die Arbeit.</translation>
        </message>
        <message>
            <source>Looking at this PC…</source>
            <translation>Dieser PC wird untersucht…</translation>
        </message>
        <message>
            <source>no graphics card that PyTorch can use</source>
            <translation>keine Grafikkarte, die PyTorch nutzen kann</translation>
        </message>
        <message>
            <source>Found: {0}. Everything is here already, and is prepared for this version.</source>
            <translation>Gefunden: {0}. Alles ist schon da und wird für diese Version vorbereitet.</translation>
        </message>
        <message>
            <source>It is fetched once: {0}, about {1} on the disk when it is unpacked.</source>
            <translation>Wird einmal heruntergeladen: {0}, entpackt etwa {1} auf dem Datenträger.</translation>
        </message>
        <message>
            <source>The engine with PyTorch for {0} suits this PC.</source>
            <translation>Die Engine mit PyTorch für {0} passt zu diesem PC.</translation>
        </message>
        <message>
            <source>Found: {0}. The engine comes with PyTorch for {1}.</source>
            <translation>Gefunden: {0}. Die Engine kommt mit PyTorch für {1}.</translation>
        </message>
        <message>
            <source>Checking what was fetched…</source>
            <translation>Das Heruntergeladene wird geprüft…</translation>
        </message>
        <message>
            <source>Unpacking…</source>
            <translation>Wird entpackt…</translation>
        </message>
        <message>
            <source>Testing it on this PC…</source>
            <translation>Wird auf diesem PC getestet…</translation>
        </message>
        <message>
            <source>Finishing…</source>
            <translation>Wird abgeschlossen…</translation>
        </message>
        <message>
            <source>Installing…</source>
            <translation>Wird installiert…</translation>
        </message>
    </context>
    <context>
        <name>FirstRunPage</name>
        <message>
            <source>This PC</source>
            <translation>Dieser PC</translation>
        </message>
        <message>
            <source>Recommended for this PC</source>
            <translation>Empfohlen für diesen PC</translation>
        </message>
        <message>
            <source>Just try the starter</source>
            <translation>Nur das Startmodell ausprobieren</translation>
        </message>
        <message>
            <source>A small Mixture of Experts that runs on any machine, converted here from a PyPI package, for a first look. It gets facts wrong and may repeat itself.</source>
            <translation>Ein kleines „Mixture of Experts“, das auf jedem Rechner läuft, hier aus einem PyPI-Paket umgewandelt, für einen ersten Blick. Es irrt sich in Fakten und wiederholt sich mitunter.</translation>
        </message>
        <message>
            <source>Looking at this PC…</source>
            <translation>Dieser PC wird untersucht…</translation>
        </message>
        <message>
            <source>Choose a first model</source>
            <translation>Erstes Modell wählen</translation>
        </message>
        <message>
            <source>Welcome to Switchyard</source>
            <translation>Willkommen bei Switchyard</translation>
        </message>
        <message>
            <source>Open a model file…</source>
            <translation>Modelldatei öffnen…</translation>
        </message>
        <message>
            <source>Search for others…</source>
            <translation>Andere suchen…</translation>
        </message>
        <message>
            <source>Use a remote server…</source>
            <translation>Anderen Server nutzen…</translation>
        </message>
        <message>
            <source>Go to the chats</source>
            <translation>Zu den Chats</translation>
        </message>
        <message>
            <source>First the engine, then a model. Nothing is downloaded before you click.</source>
            <translation>Zuerst die Engine, dann ein Modell. Vor Ihrem Klick wird nichts heruntergeladen.</translation>
        </message>
        <message>
            <source>Choose a first model. Nothing is downloaded before you click.</source>
            <translation>Wählen Sie ein erstes Modell. Vor Ihrem Klick wird nichts heruntergeladen.</translation>
        </message>
        <message>
            <source>No model of the catalogue suits this PC: the starter runs everywhere.</source>
            <translation>Kein Modell des Katalogs passt zu diesem PC: Das Startmodell läuft überall.</translation>
        </message>
    </context>
    <context>
        <name>Fit</name>
        <message>
            <source>{0}%</source>
            <translation>{0} %</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>{0} MB</source>
            <translation>{0} MB</translation>
        </message>
        <message>
            <source>Fast</source>
            <translation>Schnell</translation>
        </message>
        <message>
            <source>Works</source>
            <translation>Läuft</translation>
        </message>
        <message>
            <source>Batch only</source>
            <translation>Nur Stapel</translation>
        </message>
        <message>
            <source>Too large</source>
            <translation>Zu groß</translation>
        </message>
        <message>
            <source>original</source>
            <translation>Original</translation>
        </message>
        <message>
            <source>near-original</source>
            <translation>fast Original</translation>
        </message>
        <message>
            <source>good quality</source>
            <translation>gute Qualität</translation>
        </message>
        <message>
            <source>fair quality</source>
            <translation>mäßige Qualität</translation>
        </message>
        <message>
            <source>poor quality</source>
            <translation>geringe Qualität</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} Token/s</translation>
        </message>
        <message>
            <source>about {0} tokens/s</source>
            <translation>etwa {0} Token/s</translation>
        </message>
        <message>
            <source>measured here</source>
            <translation>hier gemessen</translation>
        </message>
        <message>
            <source>estimated, {0} to {1}</source>
            <translation>geschätzt, {0} bis {1}</translation>
        </message>
        <message>
            <source>first token after {0} s</source>
            <translation>erstes Token nach {0} s</translation>
        </message>
        <message>
            <source>first token after about {0} s</source>
            <translation>erstes Token nach etwa {0} s</translation>
        </message>
        <message>
            <source>pictures: about {0} s each on the graphics card, {1}</source>
            <translation>Bilder: je etwa {0} s auf der Grafikkarte, {1}</translation>
        </message>
        <message>
            <source>pictures: about {0} s each on the CPU, {1}</source>
            <translation>Bilder: je etwa {0} s auf der CPU, {1}</translation>
        </message>
        <message>
            <source>download</source>
            <translation>Download</translation>
        </message>
        <message>
            <source>converted weights</source>
            <translation>umgewandelte Gewichte</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>Datenträger</translation>
        </message>
        <message>
            <source>Library</source>
            <translation>Bibliothek</translation>
        </message>
        <message>
            <source>recommended</source>
            <translation>empfohlen</translation>
        </message>
        <message numerus="yes">
            <source>{0} and {1} more</source>
            <translation>
                <numerusform>{0} und {1} weitere</numerusform>
                <numerusform>{0} und {1} weitere</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} GB</source>
            <translation>{0} GB</translation>
        </message>
        <message>
            <source>{0} GB/s</source>
            <translation>{0} GB/s</translation>
        </message>
        <message>
            <source>{0} s</source>
            <translation>{0} s</translation>
        </message>
        <message>
            <source>{0} min</source>
            <translation>{0} min</translation>
        </message>
        <message>
            <source>{0} h {1} min</source>
            <translation>{0} h {1} min</translation>
        </message>
        <message>
            <source>{0} h</source>
            <translation>{0} h</translation>
        </message>
        <message numerus="yes">
            <source>{0} days</source>
            <translation>
                <numerusform>{0} Tag</numerusform>
                <numerusform>{0} Tage</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} MB/s</source>
            <translation>{0} MB/s</translation>
        </message>
    </context>
    <context>
        <name>FitCardView</name>
        <message>
            <source>Context in tokens</source>
            <translation>Kontext in Token</translation>
        </message>
        <message>
            <source>Memory for the expert cache</source>
            <translation>Speicher für den Experten-Cache</translation>
        </message>
        <message>
            <source>VRAM to use</source>
            <translation>Nutzbarer VRAM</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>Herunterladen</translation>
        </message>
        <message>
            <source>Load anyway…</source>
            <translation>Trotzdem laden…</translation>
        </message>
        <message>
            <source>RAM to use</source>
            <translation>Nutzbarer RAM</translation>
        </message>
        <message>
            <source>Reading what the repository holds…</source>
            <translation>Inhalt des Repositorys wird gelesen…</translation>
        </message>
        <message>
            <source>Reading headers: {0} of {1} files…</source>
            <translation>Dateiköpfe werden gelesen: {0} von {1} Dateien…</translation>
        </message>
        <message>
            <source>{0} tokens</source>
            <translation>{0} Token</translation>
        </message>
        <message>
            <source>all that is free</source>
            <translation>alles, was frei ist</translation>
        </message>
        <message>
            <source>at most {0}</source>
            <translation>höchstens {0}</translation>
        </message>
        <message>
            <source>runs in {0}</source>
            <translation>läuft in {0}</translation>
        </message>
        <message>
            <source>keys and values of that context: {0}</source>
            <translation>Keys und Values dieses Kontexts: {0}</translation>
        </message>
        <message>
            <source>Download {0}</source>
            <translation>{0} herunterladen</translation>
        </message>
        <message>
            <source>Downloading {0}</source>
            <translation>{0} wird heruntergeladen</translation>
        </message>
        <message>
            <source>Load {0}</source>
            <translation>{0} laden</translation>
        </message>
        <message>
            <source>Load {0} anyway</source>
            <translation>{0} trotzdem laden</translation>
        </message>
        <message>
            <source>There is no {0} here. {1} would be downloaded: choose another row to take that one.</source>
            <translation>{0} gibt es hier nicht. Heruntergeladen würde {1}: Wählen Sie eine andere Zeile, um jene zu nehmen.</translation>
        </message>
        <message>
            <source>No file was named. {0} would be downloaded: choose another row to take that one.</source>
            <translation>Es wurde keine Datei genannt. Heruntergeladen würde {0}: Wählen Sie eine andere Zeile, um jene zu nehmen.</translation>
        </message>
        <message>
            <source>Context</source>
            <translation>Kontext</translation>
        </message>
    </context>
    <context>
        <name>FitDelegate</name>
        <message>
            <source>recommended</source>
            <translation>empfohlen</translation>
        </message>
    </context>
    <context>
        <name>FitTable</name>
        <message>
            <source>File</source>
            <translation>Datei</translation>
        </message>
        <message>
            <source>Memory</source>
            <translation>Speicher</translation>
        </message>
        <message>
            <source>Speed</source>
            <translation>Tempo</translation>
        </message>
        <message>
            <source>On this PC</source>
            <translation>Auf diesem PC</translation>
        </message>
        <message>
            <source>Files, and how they would run here</source>
            <translation>Dateien und wie sie hier laufen würden</translation>
        </message>
    </context>
    <context>
        <name>FoldCard</name>
        <message>
            <source>Edit the summary</source>
            <translation>Zusammenfassung bearbeiten</translation>
        </message>
        <message>
            <source>Summarise again</source>
            <translation>Neu zusammenfassen</translation>
        </message>
        <message>
            <source>Send the turns again</source>
            <translation>Nachrichten wieder senden</translation>
        </message>
        <message>
            <source>The model reads the turns themselves again, as far as they fit.</source>
            <translation>Das Modell liest wieder die Nachrichten selbst, soweit sie hineinpassen.</translation>
        </message>
        <message>
            <source>Hide the turns</source>
            <translation>Nachrichten ausblenden</translation>
        </message>
        <message>
            <source>Show the turns</source>
            <translation>Nachrichten anzeigen</translation>
        </message>
        <message>
            <source>Write a summary</source>
            <translation>Zusammenfassung schreiben</translation>
        </message>
        <message>
            <source>Summary of the earlier turns</source>
            <translation>Zusammenfassung der früheren Nachrichten</translation>
        </message>
        <message>
            <source>Summary of one earlier turn</source>
            <translation>Zusammenfassung einer früheren Nachricht</translation>
        </message>
        <message numerus="yes">
            <source>Summary of {0} earlier turns</source>
            <translation>
                <numerusform>Zusammenfassung von {0} früheren Nachricht</numerusform>
                <numerusform>Zusammenfassung von {0} früheren Nachrichten</numerusform>
            </translation>
        </message>
        <message>
            <source>One earlier turn is left out</source>
            <translation>Eine frühere Nachricht ist weggelassen</translation>
        </message>
        <message numerus="yes">
            <source>{0} earlier turns are left out</source>
            <translation>
                <numerusform>{0} frühere Nachricht ist weggelassen</numerusform>
                <numerusform>{0} frühere Nachrichten sind weggelassen</numerusform>
            </translation>
        </message>
        <message>
            <source>These turns were changed since the summary was made.</source>
            <translation>Diese Nachrichten wurden geändert, seit die Zusammenfassung entstand.</translation>
        </message>
        <message>
            <source>The model reads nothing of them. They are kept, and can be sent again.</source>
            <translation>Das Modell liest nichts davon. Sie bleiben erhalten und können wieder gesendet werden.</translation>
        </message>
        <message>
            <source>you</source>
            <translation>Ihnen</translation>
        </message>
        <message>
            <source>The model reads this instead of the turns, which are kept. Written by {0}.</source>
            <translation>Das Modell liest dies statt der Nachrichten, die erhalten bleiben. Geschrieben von {0}.</translation>
        </message>
    </context>
    <context>
        <name>FolderChoice</name>
        <message>
            <source>Download folder</source>
            <translation>Ordner für Downloads</translation>
        </message>
        <message>
            <source>Download to</source>
            <translation>Herunterladen nach</translation>
        </message>
        <message>
            <source>Library</source>
            <translation>Bibliothek</translation>
        </message>
        <message>
            <source>not connected</source>
            <translation>nicht verbunden</translation>
        </message>
        <message>
            <source>{0} free</source>
            <translation>{0} frei</translation>
        </message>
    </context>
    <context>
        <name>FoldersDialog</name>
        <message>
            <source>Model folders</source>
            <translation>Modellordner</translation>
        </message>
        <message>
            <source>Models in these folders are listed and used where they lie. The Models page asks which of them a download goes into. Those of LM Studio, Ollama, Jan, GPT4All and the hub's own cache are found automatically.</source>
            <translation>Modelle in diesen Ordnern werden aufgelistet und dort genutzt, wo sie liegen. Die Seite „Modelle“ fragt, in welchen davon ein Download kommt. Die Ordner von LM Studio, Ollama, Jan, GPT4All und der Cache des Hubs werden automatisch gefunden.</translation>
        </message>
        <message>
            <source>Add a folder…</source>
            <translation>Ordner hinzufügen…</translation>
        </message>
        <message>
            <source>Remove from list</source>
            <translation>Aus der Liste entfernen</translation>
        </message>
        <message>
            <source>Open</source>
            <translation>Öffnen</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>Schließen</translation>
        </message>
        <message>
            <source>Folder with models</source>
            <translation>Ordner mit Modellen</translation>
        </message>
    </context>
    <context>
        <name>FormFoot</name>
        <message>
            <source>Cancel</source>
            <translation>Abbrechen</translation>
        </message>
        <message>
            <source>Start</source>
            <translation>Starten</translation>
        </message>
        <message>
            <source>Checking…</source>
            <translation>Wird geprüft…</translation>
        </message>
    </context>
    <context>
        <name>FoundList</name>
        <message>
            <source>Models to get</source>
            <translation>Verfügbare Modelle</translation>
        </message>
    </context>
    <context>
        <name>HelpMark</name>
        <message>
            <source>What is “{0}”?</source>
            <translation>Was bedeutet „{0}“?</translation>
        </message>
    </context>
    <context>
        <name>HereCard</name>
        <message>
            <source>Already on this PC</source>
            <translation>Schon auf diesem PC</translation>
        </message>
        <message>
            <source>One more is on the Models page.</source>
            <translation>Ein weiteres ist auf der Seite „Modelle“.</translation>
        </message>
        <message numerus="yes">
            <source>{0} more are on the Models page.</source>
            <translation>
                <numerusform>{0} weiteres ist auf der Seite „Modelle“.</numerusform>
                <numerusform>{0} weitere sind auf der Seite „Modelle“.</numerusform>
            </translation>
        </message>
        <message>
            <source>Use</source>
            <translation>Verwenden</translation>
        </message>
        <message>
            <source>Use {0}</source>
            <translation>{0} verwenden</translation>
        </message>
    </context>
    <context>
        <name>HubCard</name>
        <message>
            <source>Finding models</source>
            <translation>Modelle finden</translation>
        </message>
        <message>
            <source>Load from file…</source>
            <translation>Aus Datei laden…</translation>
        </message>
        <message>
            <source>Catalogue of recommendations</source>
            <translation>Katalog der Empfehlungen</translation>
        </message>
        <message>
            <source>Asked instead of Hugging Face, also on the command line.</source>
            <translation>Wird statt Hugging Face gefragt, auch auf der Kommandozeile.</translation>
        </message>
        <message>
            <source>HF_ENDPOINT in the environment names {0}, which is used.</source>
            <translation>HF_ENDPOINT in der Umgebung nennt {0}; dies wird verwendet.</translation>
        </message>
        <message>
            <source>Mirror of the hub</source>
            <translation>Spiegelserver des Hubs</translation>
        </message>
        <message>
            <source>PyPI and PyTorch</source>
            <translation>PyPI und PyTorch</translation>
        </message>
        <message>
            <source>Where the engine of an installed Switchyard is fetched from instead.</source>
            <translation>Woher die Engine eines installierten Switchyard stattdessen geholt wird.</translation>
        </message>
        <message>
            <source>Mirror of packages</source>
            <translation>Spiegelserver für Pakete</translation>
        </message>
        <message>
            <source>the system's</source>
            <translation>der des Systems</translation>
        </message>
        <message>
            <source>For everything from the network; where it wants a login, as http://NAME:PASSWORD@HOST:PORT.</source>
            <translation>Für alles aus dem Netz; wo eine Anmeldung nötig ist, als http://NAME:PASSWORD@HOST:PORT.</translation>
        </message>
        <message>
            <source>Proxy</source>
            <translation>Proxy</translation>
        </message>
        <message>
            <source>None is kept. One is asked for when a model needs it.</source>
            <translation>Keines ist gespeichert. Danach wird gefragt, wenn ein Modell eines braucht.</translation>
        </message>
        <message>
            <source>In the system's keyring, or for this run only where there is none.</source>
            <translation>Im Schlüsselbund des Systems oder, wo es keinen gibt, nur bis zum Beenden.</translation>
        </message>
        <message>
            <source>Access tokens</source>
            <translation>Zugriffstoken</translation>
        </message>
        <message>
            <source>A newer catalogue</source>
            <translation>Ein neuerer Katalog</translation>
        </message>
        <message>
            <source>Catalogues (*.json)</source>
            <translation>Kataloge (*.json)</translation>
        </message>
        <message>
            <source>{0} models, as of {1}.</source>
            <translation>{0} Modelle, Stand {1}.</translation>
        </message>
        <message>
            <source>The token of another program is still used for {0}: see “hf auth logout”, or HF_TOKEN.</source>
            <translation>Für {0} wird noch das Token eines anderen Programms verwendet: siehe „hf auth logout“ oder HF_TOKEN.</translation>
        </message>
    </context>
    <context>
        <name>InputCard</name>
        <message>
            <source>Another file…</source>
            <translation>Andere Datei…</translation>
        </message>
        <message>
            <source>First rows of the file</source>
            <translation>Erste Zeilen der Datei</translation>
        </message>
        <message>
            <source>Encoding</source>
            <translation>Kodierung</translation>
        </message>
        <message>
            <source>Encoding: automatic</source>
            <translation>Kodierung: automatisch</translation>
        </message>
        <message>
            <source>Separator</source>
            <translation>Trennzeichen</translation>
        </message>
        <message>
            <source>Separator: automatic</source>
            <translation>Trennzeichen: automatisch</translation>
        </message>
        <message>
            <source>tab</source>
            <translation>Tabulator</translation>
        </message>
        <message>
            <source>Sheet</source>
            <translation>Tabellenblatt</translation>
        </message>
        <message>
            <source>A text file is one row</source>
            <translation>Eine Textdatei ist eine Zeile</translation>
        </message>
        <message>
            <source>Otherwise each line is a row</source>
            <translation>Sonst ist jede Textzeile eine Zeile</translation>
        </message>
        <message>
            <source>Reading the file…</source>
            <translation>Datei wird gelesen…</translation>
        </message>
        <message>
            <source>An OpenAI batch file: rows have their own messages and settings; answers are in OpenAI's format.</source>
            <translation>Eine OpenAI-Batch-Datei: Zeilen haben eigene Nachrichten und Einstellungen; Antworten sind im Format von OpenAI.</translation>
        </message>
        <message>
            <source>Sheet: {0}</source>
            <translation>Blatt: {0}</translation>
        </message>
        <message>
            <source>Some rows are not valid text in this encoding: choose another below the table.</source>
            <translation>Einige Zeilen sind in dieser Kodierung kein gültiger Text: Wählen Sie unter der Tabelle eine andere.</translation>
        </message>
        <message>
            <source>Some of the first rows cannot be answered: one {0}.</source>
            <translation>Einige der ersten Zeilen können nicht beantwortet werden. Eine davon: {0}.</translation>
        </message>
        <message>
            <source>1 column</source>
            <translation>1 Spalte</translation>
        </message>
        <message numerus="yes">
            <source>{0} columns</source>
            <translation>
                <numerusform>{0} Spalte</numerusform>
                <numerusform>{0} Spalten</numerusform>
            </translation>
        </message>
        <message>
            <source>1 row</source>
            <translation>1 Zeile</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows</source>
            <translation>
                <numerusform>{0} Zeile</numerusform>
                <numerusform>{0} Zeilen</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>Installation</name>
        <message>
            <source>The installation could not be started: install Switchyard again.</source>
            <translation>Die Installation konnte nicht gestartet werden: Installieren Sie Switchyard neu.</translation>
        </message>
    </context>
    <context>
        <name>JobDelegate</name>
        <message>
            <source>{0} failed</source>
            <translation>{0} fehlgeschlagen</translation>
        </message>
    </context>
    <context>
        <name>JobStrip</name>
        <message>
            <source>Jobs</source>
            <translation>Aufträge</translation>
        </message>
    </context>
    <context>
        <name>Kept</name>
        <message>
            <source>{0} was damaged; it is kept as {1}, and a new one is begun.</source>
            <translation>{0} war beschädigt; die Datei bleibt als {1} erhalten, und eine neue wird begonnen.</translation>
        </message>
        <message>
            <source>{0} could not be read ({1}): what you keep now is lost when the window closes.</source>
            <translation>{0} konnte nicht gelesen werden ({1}): Was Sie jetzt sichern, geht verloren, wenn das Fenster geschlossen wird.</translation>
        </message>
        <message>
            <source>{0} could not be saved ({1}); free some space or check its permissions.</source>
            <translation>{0} konnte nicht gespeichert werden ({1}); geben Sie Platz frei oder prüfen Sie die Berechtigungen.</translation>
        </message>
    </context>
    <context>
        <name>KeptCard</name>
        <message>
            <source>Continuing chats</source>
            <translation>Chats fortsetzen</translation>
        </message>
        <message>
            <source>Clear</source>
            <translation>Leeren</translation>
        </message>
        <message>
            <source>Clear kept context</source>
            <translation>Behaltenen Kontext löschen</translation>
        </message>
        <message>
            <source>Now</source>
            <translation>Jetzt</translation>
        </message>
        <message>
            <source>{0} of all chats and models together.</source>
            <translation>{0} für alle Chats und Modelle zusammen.</translation>
        </message>
        <message>
            <source>Nothing is kept.</source>
            <translation>Nichts ist gespeichert.</translation>
        </message>
        <message>
            <source>The folder cannot be changed: {0}</source>
            <translation>Der Ordner kann nicht geändert werden: {0}</translation>
        </message>
    </context>
    <context>
        <name>Lane</name>
        <message>
            <source>Phase</source>
            <translation>Phase</translation>
        </message>
        <message>
            <source>What the model is doing: reading a prompt (prefill), writing an answer token by token (decode), or a batch step, which takes many rows through the model at once. Each tick is a token: a word or a part of one.</source>
            <translation>Was das Modell tut: einen Prompt lesen (Prefill), eine Antwort Token für Token schreiben (Decode) oder einen Stapelschritt, der viele Zeilen zugleich durch das Modell führt. Jede Marke ist ein Token: ein Wort oder ein Teil davon.</translation>
        </message>
        <message>
            <source>Requests</source>
            <translation>Anfragen</translation>
        </message>
        <message>
            <source>A row for each answer that is being worked on, for this window or other programs, here or at another server: waiting (hatched), its prompt being read (pale), its answer being written. A batch job has a row, too (outlined).</source>
            <translation>Eine Zeile für jede Antwort in Arbeit, für dieses Fenster oder andere Programme, hier oder auf einem anderen Server: wartend (schraffiert), ihr Prompt wird gelesen (blass), ihre Antwort wird geschrieben. Auch ein Stapelauftrag hat eine Zeile (umrandet).</translation>
        </message>
        <message>
            <source>Sweeps</source>
            <translation>Durchläufe</translation>
        </message>
        <message>
            <source>What goes through the layers together: one token of each answer that is being written, and (hatched) pieces of prompts that are being read. Batch jobs have sweeps of their own. From close up each sweep is a block with its tokens.</source>
            <translation>Was gemeinsam durch die Schichten läuft: ein Token jeder Antwort, die geschrieben wird, und (schraffiert) Stücke von Prompts, die gelesen werden. Stapelaufträge haben eigene Durchläufe. Aus der Nähe ist jeder Durchlauf ein Block mit seinen Token.</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>How busy the graphics card is with our model. In gaps it waits for something else, usually for weights or for the processor.</source>
            <translation>Wie stark unser Modell die Grafikkarte auslastet. In Lücken wartet sie auf etwas anderes, meist auf Gewichte oder den Prozessor.</translation>
        </message>
        <message>
            <source>computing on the GPU</source>
            <translation>Rechnen auf der GPU</translation>
        </message>
        <message>
            <source>To the GPU</source>
            <translation>Zur GPU</translation>
        </message>
        <message>
            <source>Weights being copied from RAM to the graphics card. This is the cost of a miss: an expert that is needed but not in the card's memory.</source>
            <translation>Gewichte, die vom RAM zur Grafikkarte kopiert werden. Das ist der Preis eines Fehlzugriffs: ein Experte, der gebraucht wird, aber nicht im Speicher der Karte liegt.</translation>
        </message>
        <message>
            <source>copying weights to the GPU</source>
            <translation>Kopieren von Gewichten zur GPU</translation>
        </message>
        <message>
            <source>to the GPU</source>
            <translation>zur GPU</translation>
        </message>
        <message>
            <source>passing results to the GPU</source>
            <translation>Übergabe von Ergebnissen an die GPU</translation>
        </message>
        <message>
            <source>results</source>
            <translation>Ergebnisse</translation>
        </message>
        <message>
            <source>From the GPU</source>
            <translation>Von der GPU</translation>
        </message>
        <message>
            <source>Copies from the graphics card to RAM, mostly small results. Large amounts are a batch's data that has no room on the card.</source>
            <translation>Kopien von der Grafikkarte in den RAM, meist kleine Ergebnisse. Große Mengen sind Daten eines Stapels, die auf der Karte keinen Platz haben.</translation>
        </message>
        <message>
            <source>copying from the GPU</source>
            <translation>Kopieren von der GPU</translation>
        </message>
        <message>
            <source>from the GPU</source>
            <translation>von der GPU</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>How busy the processor is with our model: with experts, the parts of a layer of which each token uses only a few, and with attention, which looks back at the text so far. Together they can fill the lane.</source>
            <translation>Wie stark unser Modell den Prozessor auslastet: mit Experten, den Teilen einer Schicht, von denen jedes Token nur wenige nutzt, und mit der Attention, die auf den bisherigen Text zurückblickt. Zusammen können sie die Spur füllen.</translation>
        </message>
        <message>
            <source>computing experts on the CPU</source>
            <translation>Rechnen von Experten auf der CPU</translation>
        </message>
        <message>
            <source>CPU experts</source>
            <translation>Experten auf der CPU</translation>
        </message>
        <message>
            <source>attention and other layers on the CPU</source>
            <translation>Attention und andere Schichten auf der CPU</translation>
        </message>
        <message>
            <source>CPU attention</source>
            <translation>Attention auf der CPU</translation>
        </message>
        <message>
            <source>Pictures</source>
            <translation>Bilder</translation>
        </message>
        <message>
            <source>Pictures being turned into tokens by the part of the model that sees, on the graphics card or the processor. Each is read once: the next question about it begins at once.</source>
            <translation>Bilder, die der sehende Teil des Modells in Tokens verwandelt, auf der Grafikkarte oder dem Prozessor. Jedes wird einmal gelesen: Die nächste Frage dazu beginnt sofort.</translation>
        </message>
        <message>
            <source>reading pictures</source>
            <translation>Bilder lesen</translation>
        </message>
        <message>
            <source>pictures</source>
            <translation>Bilder</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>Datenträger</translation>
        </message>
        <message>
            <source>Experts being read from disk because RAM has no room for them. If this lane is often full, more RAM or a lower precision helps most.</source>
            <translation>Experten, die vom Datenträger gelesen werden, weil im RAM kein Platz ist. Ist diese Spur oft voll, hilft mehr RAM oder eine geringere Genauigkeit am meisten.</translation>
        </message>
        <message>
            <source>reading from disk</source>
            <translation>Lesen vom Datenträger</translation>
        </message>
        <message>
            <source>disk</source>
            <translation>Datenträger</translation>
        </message>
        <message>
            <source>Experts</source>
            <translation>Experten</translation>
        </message>
        <message>
            <source>Where the needed experts were: in the card's memory (a hit), copied there first (fetched, a miss), or computed on the processor instead. More hits mean less waiting; without a graphics card everything is computed on the processor.</source>
            <translation>Wo die gebrauchten Experten waren: im Speicher der Karte (ein Treffer), erst dorthin kopiert (geholt, ein Fehlzugriff) oder stattdessen auf dem Prozessor berechnet. Mehr Treffer heißt weniger Warten; ohne Grafikkarte wird alles auf dem Prozessor berechnet.</translation>
        </message>
        <message>
            <source>Tokens/s</source>
            <translation>Token/s</translation>
        </message>
        <message>
            <source>How many tokens per second are written while the model is working. For a batch this counts the tokens of all rows, including their prompts.</source>
            <translation>Wie viele Token pro Sekunde geschrieben werden, während das Modell arbeitet. Bei einem Stapel zählen die Token aller Zeilen, mit ihren Prompts.</translation>
        </message>
        <message>
            <source>GPU busy</source>
            <translation>GPU-Last</translation>
        </message>
        <message>
            <source>How busy the graphics card is, for all programs.</source>
            <translation>Wie stark alle Programme die Grafikkarte auslasten.</translation>
        </message>
        <message>
            <source>CPU busy</source>
            <translation>CPU-Last</translation>
        </message>
        <message>
            <source>How busy the whole processor is: filled for Switchyard, dashed for all programs. A wide gap between the two is what other programs use.</source>
            <translation>Wie stark der ganze Prozessor ausgelastet ist: gefüllt für Switchyard, gestrichelt für alle Programme. Ein großer Abstand ist das, was andere Programme nutzen.</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>Memory in use: filled for Switchyard, dashed for all programs.</source>
            <translation>Belegter Speicher: gefüllt für Switchyard, gestrichelt für alle Programme.</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>The card's memory in use: filled for Switchyard, dashed for all programs.</source>
            <translation>Belegter Speicher der Karte: gefüllt für Switchyard, gestrichelt für alle Programme.</translation>
        </message>
        <message>
            <source>PCIe</source>
            <translation>PCIe</translation>
        </message>
        <message>
            <source>Traffic on the graphics card's slot, both ways, of all programs.</source>
            <translation>Verkehr am Steckplatz der Grafikkarte, in beide Richtungen, von allen Programmen.</translation>
        </message>
        <message>
            <source>Page faults</source>
            <translation>Seitenfehler</translation>
        </message>
        <message>
            <source>Memory pages that the system had to map first: many slow things down.</source>
            <translation>Speicherseiten, die das System erst zuordnen musste: Viele davon bremsen.</translation>
        </message>
        <message>
            <source>Disk I/O</source>
            <translation>Datenträger</translation>
        </message>
        <message>
            <source>Reads from the disk and (dashed) writes to it, of all programs.</source>
            <translation>Lesen vom Datenträger und (gestrichelt) Schreiben, von allen Programmen.</translation>
        </message>
        <message>
            <source>GPU power</source>
            <translation>GPU-Leistung</translation>
        </message>
        <message>
            <source>The power that the graphics card draws.</source>
            <translation>Die Leistung, die die Grafikkarte aufnimmt.</translation>
        </message>
        <message>
            <source>CPU power</source>
            <translation>CPU-Leistung</translation>
        </message>
        <message>
            <source>The power that the processor draws.</source>
            <translation>Die Leistung, die der Prozessor aufnimmt.</translation>
        </message>
        <message>
            <source>GPU clock</source>
            <translation>GPU-Takt</translation>
        </message>
        <message>
            <source>The graphics card's clock rate: it falls when the card is too hot.</source>
            <translation>Der Takt der Grafikkarte: Er sinkt, wenn die Karte zu heiß wird.</translation>
        </message>
        <message>
            <source>CPU clock</source>
            <translation>CPU-Takt</translation>
        </message>
        <message>
            <source>The processor's clock rate: it falls when too hot or saving power.</source>
            <translation>Der Takt des Prozessors: Er sinkt bei Hitze oder um Strom zu sparen.</translation>
        </message>
        <message>
            <source>GPU heat</source>
            <translation>GPU-Temperatur</translation>
        </message>
        <message>
            <source>How hot the graphics card is.</source>
            <translation>Wie heiß die Grafikkarte ist.</translation>
        </message>
        <message>
            <source>CPU heat</source>
            <translation>CPU-Temperatur</translation>
        </message>
        <message>
            <source>How hot the processor is.</source>
            <translation>Wie heiß der Prozessor ist.</translation>
        </message>
    </context>
    <context>
        <name>Languages</name>
        <message>
            <source>Switchyard does not speak {0} yet, so it is in English. Settings has its languages.</source>
            <translation>Switchyard spricht noch kein {0} und ist daher auf Englisch. Die verfügbaren Sprachen stehen in den Einstellungen.</translation>
        </message>
    </context>
    <context>
        <name>LicencesDialog</name>
        <message>
            <source>Licences</source>
            <translation>Lizenzen</translation>
        </message>
    </context>
    <context>
        <name>Loading</name>
        <message>
            <source>Opening the model</source>
            <translation>Modell wird geöffnet</translation>
        </message>
        <message>
            <source>Reading weights</source>
            <translation>Gewichte werden gelesen</translation>
        </message>
        <message>
            <source>Converting weights; later starts skip this</source>
            <translation>Gewichte werden umgewandelt; spätere Starts überspringen das</translation>
        </message>
        <message>
            <source>Loading the model</source>
            <translation>Modell wird geladen</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} von {1}</translation>
        </message>
        <message>
            <source>{0} left</source>
            <translation>noch {0}</translation>
        </message>
    </context>
    <context>
        <name>MachineCard</name>
        <message>
            <source>Machine</source>
            <translation>Rechner</translation>
        </message>
        <message>
            <source>Sensor and driver data of the whole machine, other programs included. If the processor is much busier than our share of it, other programs are slowing the model down.</source>
            <translation>Sensor- und Treiberdaten des ganzen Rechners, mit anderen Programmen. Ist der Prozessor viel stärker ausgelastet als durch uns, bremsen andere Programme das Modell.</translation>
        </message>
        <message>
            <source>from sensors and drivers</source>
            <translation>von Sensoren und Treibern</translation>
        </message>
        <message>
            <source>Graphics card: no sensor data</source>
            <translation>Grafikkarte: keine Sensordaten</translation>
        </message>
        <message>
            <source>No sensor data yet.</source>
            <translation>Noch keine Sensordaten.</translation>
        </message>
        <message>
            <source>CPU {0}%</source>
            <translation>CPU {0} %</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>ours {0}%</source>
            <translation>wir {0} %</translation>
        </message>
        <message>
            <source>{0} GHz</source>
            <translation>{0} GHz</translation>
        </message>
        <message>
            <source>{0} °C</source>
            <translation>{0} °C</translation>
        </message>
        <message>
            <source>power not available</source>
            <translation>Leistungsaufnahme nicht verfügbar</translation>
        </message>
        <message>
            <source>{0} W</source>
            <translation>{0} W</translation>
        </message>
        <message>
            <source>Disk {0} MB/s read, {1} MB/s written</source>
            <translation>Datenträger: {0} MB/s gelesen, {1} MB/s geschrieben</translation>
        </message>
        <message>
            <source>{0}% busy</source>
            <translation>{0} % ausgelastet</translation>
        </message>
        <message>
            <source>page faults {0}/s, {1}/s from disk</source>
            <translation>Seitenfehler {0}/s, davon {1}/s vom Datenträger</translation>
        </message>
    </context>
    <context>
        <name>MachineFooter</name>
        <message>
            <source>Memory</source>
            <translation>Speicher</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>No GPU in use</source>
            <translation>Keine GPU in Gebrauch</translation>
        </message>
        <message>
            <source>Show what holds the memory</source>
            <translation>Zeigen, was den Speicher belegt</translation>
        </message>
        <message>
            <source>Fold the memory into one bar</source>
            <translation>Speicher zu einem Balken zusammenklappen</translation>
        </message>
        <message>
            <source>Model: the weights that every token needs. Its experts: those of which each token needs a few. Chat memory: keys and values of conversations (KV). These figures are the engine's; RAM in use and in all are the operating system's.</source>
            <translation>Modell: die Gewichte, die jedes Token braucht. Seine Experten: die, von denen jedes Token einige braucht. Chat-Speicher: Keys und Values von Gesprächen (KV). Diese Zahlen stammen von der Engine; belegter und gesamter RAM vom Betriebssystem.</translation>
        </message>
        <message>
            <source>VRAM in use and total: from the driver.</source>
            <translation>VRAM belegt und gesamt: vom Treiber.</translation>
        </message>
        <message>
            <source>Memory of the emulated graphics card: from the engine.</source>
            <translation>Speicher der emulierten Grafikkarte: von der Engine.</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modell</translation>
        </message>
        <message>
            <source>Its experts</source>
            <translation>Seine Experten</translation>
        </message>
        <message>
            <source>Chat memory</source>
            <translation>Chat-Speicher</translation>
        </message>
        <message>
            <source>Switchyard</source>
            <translation>Switchyard</translation>
        </message>
        <message>
            <source>Other programs</source>
            <translation>Sonstiges</translation>
        </message>
        <message>
            <source>1 core</source>
            <translation>1 Kern</translation>
        </message>
        <message numerus="yes">
            <source>{0} cores</source>
            <translation>
                <numerusform>{0} Kern</numerusform>
                <numerusform>{0} Kerne</numerusform>
            </translation>
        </message>
        <message>
            <source>{0}, not in use</source>
            <translation>{0}, nicht in Gebrauch</translation>
        </message>
        <message>
            <source>1 thread</source>
            <translation>1 Thread</translation>
        </message>
        <message numerus="yes">
            <source>{0} threads</source>
            <translation>
                <numerusform>{0} Thread</numerusform>
                <numerusform>{0} Threads</numerusform>
            </translation>
        </message>
        <message>
            <source>tuned</source>
            <translation>optimiert</translation>
        </message>
        <message>
            <source>Where the model runs, as reported by the engine.</source>
            <translation>Wo das Modell läuft, laut Engine.</translation>
        </message>
        <message>
            <source>Loading the model</source>
            <translation>Modell wird geladen</translation>
        </message>
        <message>
            <source>Loading the model, {0}%</source>
            <translation>Modell wird geladen, {0} %</translation>
        </message>
        <message>
            <source>Starting the engine</source>
            <translation>Engine wird gestartet</translation>
        </message>
        <message>
            <source>No model loaded</source>
            <translation>Kein Modell geladen</translation>
        </message>
    </context>
    <context>
        <name>MachinePicture</name>
        <message>
            <source>Picture of this machine</source>
            <translation>Bild dieses Rechners</translation>
        </message>
    </context>
    <context>
        <name>MainWindow</name>
        <message>
            <source>Switchyard {0} is available: get it in Settings.</source>
            <translation>Switchyard {0} ist da: Sie erhalten es in den Einstellungen.</translation>
        </message>
        <message>
            <source>Everywhere</source>
            <translation>Überall</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>Kopiert</translation>
        </message>
        <message>
            <source>The report is in {0}.</source>
            <translation>Der Bericht ist in {0}.</translation>
        </message>
        <message>
            <source>Copy report</source>
            <translation>Bericht kopieren</translation>
        </message>
        <message>
            <source>Save report…</source>
            <translation>Bericht speichern…</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>Schließen</translation>
        </message>
        <message>
            <source>Switchyard hit an error last time. You can copy a report of it, or save one with versions, hardware and logs; neither has prompts, answers or names, and nothing was sent.</source>
            <translation>Beim letzten Mal trat in Switchyard ein Fehler auf. Sie können einen Bericht darüber kopieren oder einen mit Versionen, Hardware und Protokollen speichern; keiner enthält Prompts, Antworten oder Namen, und nichts wurde gesendet.</translation>
        </message>
        <message>
            <source>{0} Your text is kept.</source>
            <translation>{0} Ihr Text bleibt erhalten.</translation>
        </message>
        <message>
            <source>Your hardware has changed since the last tuning. {0}</source>
            <translation>Ihre Hardware hat sich seit der letzten Optimierung geändert. {0}</translation>
        </message>
        <message>
            <source>{0} now runs at {1} tokens/s, much faster than the {2} that Tune measured: the machine was busy then. Tune again to find the best settings.</source>
            <translation>{0} läuft jetzt mit {1} Token/s, viel schneller als die {2}, die „Optimieren“ gemessen hat: Der Rechner war damals beschäftigt. Optimieren Sie erneut, um die besten Einstellungen zu finden.</translation>
        </message>
        <message>
            <source>The graphics card works again, but the model still runs on the CPU: reload it to use the card.</source>
            <translation>Die Grafikkarte funktioniert wieder, aber das Modell läuft noch auf der CPU: Laden Sie es neu, um die Karte zu nutzen.</translation>
        </message>
        <message>
            <source>Restart engine</source>
            <translation>Engine neu starten</translation>
        </message>
        <message>
            <source>Models</source>
            <translation>Modelle</translation>
        </message>
        <message>
            <source>Tune</source>
            <translation>Optimieren</translation>
        </message>
        <message>
            <source>Reload model</source>
            <translation>Modell neu laden</translation>
        </message>
        <message>
            <source>Show these shortcuts</source>
            <translation>Diese Tastenkürzel zeigen</translation>
        </message>
        <message>
            <source>Quit</source>
            <translation>Beenden</translation>
        </message>
    </context>
    <context>
        <name>MakingRoom</name>
        <message>
            <source>A batch job is running.</source>
            <translation>Ein Stapelauftrag läuft.</translation>
        </message>
        <message>
            <source>Tuning needs the engine to itself, so the job is paused and resumes when tuning ends. No answered row is lost.</source>
            <translation>Die Optimierung braucht die Engine für sich; der Auftrag pausiert daher und geht danach weiter. Keine beantwortete Zeile geht verloren.</translation>
        </message>
        <message>
            <source>Pause it and tune</source>
            <translation>Pausieren und optimieren</translation>
        </message>
        <message numerus="yes">
            <source>{0} batch jobs are running.</source>
            <translation>
                <numerusform>{0} Stapelauftrag läuft.</numerusform>
                <numerusform>{0} Stapelaufträge laufen.</numerusform>
            </translation>
        </message>
        <message>
            <source>Tuning needs the engine to itself, so the jobs are paused and resume when tuning ends. No answered row is lost.</source>
            <translation>Die Optimierung braucht die Engine für sich; die Aufträge pausieren daher und gehen danach weiter. Keine beantwortete Zeile geht verloren.</translation>
        </message>
        <message>
            <source>Pause them and tune</source>
            <translation>Pausieren und optimieren</translation>
        </message>
        <message>
            <source>An answer is being written.</source>
            <translation>Eine Antwort wird geschrieben.</translation>
        </message>
        <message>
            <source>Tuning needs the engine to itself. A stopped answer keeps its text so far.</source>
            <translation>Die Optimierung braucht die Engine für sich. Eine gestoppte Antwort behält ihren bisherigen Text.</translation>
        </message>
        <message>
            <source>Tune after the answer</source>
            <translation>Nach der Antwort optimieren</translation>
        </message>
        <message>
            <source>Stop the answer</source>
            <translation>Antwort stoppen</translation>
        </message>
        <message>
            <source>The batch job for {0} stays paused: it began in {1}, and the model now runs in {2}. “Keep as before” lets you resume it.</source>
            <translation>Der Stapelauftrag für {0} bleibt pausiert: Er begann in {1}, und das Modell läuft jetzt in {2}. „Wie zuvor“ lässt ihn fortsetzen.</translation>
        </message>
    </context>
    <context>
        <name>MapLegend</name>
        <message>
            <source>Recent uses: each counts half as much after 128 tokens</source>
            <translation>Jüngste Nutzungen: Nach 128 Token zählt jede nur noch halb</translation>
        </message>
        <message>
            <source>in VRAM</source>
            <translation>im VRAM</translation>
        </message>
        <message>
            <source>in RAM</source>
            <translation>im RAM</translation>
        </message>
        <message>
            <source>only on disk</source>
            <translation>nur auf dem Datenträger</translation>
        </message>
        <message>
            <source>fetching</source>
            <translation>wird geholt</translation>
        </message>
        <message>
            <source>Dark to yellow: 0 to {0} recent uses</source>
            <translation>Dunkel bis gelb: 0 bis {0} jüngste Nutzungen</translation>
        </message>
        <message>
            <source>recent uses 0</source>
            <translation>jüngste Nutzungen 0</translation>
        </message>
    </context>
    <context>
        <name>MemoryCard</name>
        <message>
            <source>Memory</source>
            <translation>Speicher</translation>
        </message>
        <message>
            <source>What fills the computer's memory and its graphics card's. Weights and experts are the model itself; KV (keys and values) is what it remembers of the conversation, and grows with its length. Kept context is that of other conversations, which go on at once with it.</source>
            <translation>Was den Speicher des Computers und den der Grafikkarte füllt. Gewichte und Experten sind das Modell selbst; KV (Keys und Values) ist, was es vom Gespräch behält, und wächst mit dessen Länge. Behaltener Kontext gehört zu anderen Gesprächen, die damit sofort weitergehen.</translation>
        </message>
        <message>
            <source>Shows a model's memory once one is loaded.</source>
            <translation>Zeigt den Speicher eines Modells, sobald eines geladen ist.</translation>
        </message>
        <message>
            <source>Parts of the model: counted by the engine. Total RAM: reported by the system.</source>
            <translation>Teile des Modells: von der Engine gezählt. Gesamter RAM: laut System.</translation>
        </message>
        <message>
            <source>Computed context of chats, of all models, of what it may take (see Settings).</source>
            <translation>Berechneter Kontext von Chats aller Modelle, gemessen an dem, was er belegen darf (siehe Einstellungen).</translation>
        </message>
        <message>
            <source>Counted by the engine, of the memory it may use.</source>
            <translation>Von der Engine gezählt, gemessen an dem Speicher, den sie nutzen darf.</translation>
        </message>
        <message>
            <source>free</source>
            <translation>frei</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>Datenträger</translation>
        </message>
        <message>
            <source>VRAM (emulated)</source>
            <translation>VRAM (emuliert)</translation>
        </message>
        <message>
            <source>VRAM {0}</source>
            <translation>VRAM {0}</translation>
        </message>
        <message>
            <source>weights</source>
            <translation>Gewichte</translation>
        </message>
        <message>
            <source>experts</source>
            <translation>Experten</translation>
        </message>
        <message>
            <source>conversation (KV)</source>
            <translation>Gespräch (KV)</translation>
        </message>
        <message>
            <source>kept context</source>
            <translation>behaltener Kontext</translation>
        </message>
        <message>
            <source>staging</source>
            <translation>Übertragungspuffer</translation>
        </message>
        <message>
            <source>activations</source>
            <translation>Aktivierungen</translation>
        </message>
        <message>
            <source>reading pictures</source>
            <translation>Bilder lesen</translation>
        </message>
        <message>
            <source>the engine itself</source>
            <translation>die Engine selbst</translation>
        </message>
        <message>
            <source>window and other programs</source>
            <translation>Fenster und andere Programme</translation>
        </message>
    </context>
    <context>
        <name>MessageEditor</name>
        <message>
            <source>Cancel</source>
            <translation>Abbrechen</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>Speichern</translation>
        </message>
        <message>
            <source>Ctrl+Enter</source>
            <translation>Strg+Eingabe</translation>
        </message>
    </context>
    <context>
        <name>MessageTools</name>
        <message>
            <source>Saved prompts  /</source>
            <translation>Gespeicherte Prompts  /</translation>
        </message>
        <message>
            <source>More for this message</source>
            <translation>Mehr zu dieser Nachricht</translation>
        </message>
        <message>
            <source>Saved prompts…	/</source>
            <translation>Gespeicherte Prompts…	/</translation>
        </message>
        <message>
            <source>Save this message as a prompt…</source>
            <translation>Diese Nachricht als Prompt speichern…</translation>
        </message>
        <message>
            <source>Ask two, side by side…	Ctrl+Shift+D</source>
            <translation>Zwei fragen, nebeneinander…	Strg+Umschalt+D</translation>
        </message>
        <message>
            <source>Ask this of every row of a file…</source>
            <translation>Dies für jede Zeile einer Datei fragen…</translation>
        </message>
    </context>
    <context>
        <name>MissRatioPlot</name>
        <message>
            <source>{0}%</source>
            <translation>{0} %</translation>
        </message>
        <message>
            <source>no room</source>
            <translation>kein Platz</translation>
        </message>
        <message>
            <source>Miss-ratio curve</source>
            <translation>Fehlzugriffskurve</translation>
        </message>
        <message>
            <source>Drag the handle to resize the cache. Hatched: more than the free memory.</source>
            <translation>Ziehen Sie den Griff, um die Größe des Caches zu ändern. Schraffiert: mehr als der freie Speicher.</translation>
        </message>
        <message>
            <source>{0} experts</source>
            <translation>{0} Experten</translation>
        </message>
        <message>
            <source>hits about {0}%</source>
            <translation>trifft etwa {0} %</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} Token/s</translation>
        </message>
        <message>
            <source>Left and right move the handle, Enter resizes the cache, Escape resets the handle.</source>
            <translation>Links und rechts bewegen den Griff, Eingabe ändert die Größe des Caches, Esc setzt den Griff zurück.</translation>
        </message>
        <message>
            <source>experts kept, of {0}</source>
            <translation>behaltene Experten, von {0}</translation>
        </message>
        <message>
            <source>hits, expected</source>
            <translation>Treffer, erwartet</translation>
        </message>
        <message>
            <source>LRU</source>
            <translation>LRU</translation>
        </message>
        <message>
            <source>tokens/s, predicted</source>
            <translation>Token/s, vorhergesagt</translation>
        </message>
        <message>
            <source>too few tokens for a curve</source>
            <translation>zu wenige Token für eine Kurve</translation>
        </message>
        <message>
            <source>now</source>
            <translation>jetzt</translation>
        </message>
    </context>
    <context>
        <name>ModelCard</name>
        <message>
            <source>Tune…</source>
            <translation>Optimieren…</translation>
        </message>
        <message>
            <source>Speed</source>
            <translation>Tempo</translation>
        </message>
        <message>
            <source>Times this machine and keeps the fastest settings.</source>
            <translation>Misst diesen Rechner und behält die schnellsten Einstellungen.</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>Startmodell</translation>
        </message>
    </context>
    <context>
        <name>ModelDialog</name>
        <message>
            <source>Models (*.gguf *.safetensors config.json)</source>
            <translation>Modelle (*.gguf *.safetensors config.json)</translation>
        </message>
        <message>
            <source>Open a model file</source>
            <translation>Modelldatei öffnen</translation>
        </message>
    </context>
    <context>
        <name>ModelPicker</name>
        <message>
            <source>Models</source>
            <translation>Modelle</translation>
        </message>
        <message>
            <source>Find a model</source>
            <translation>Modell suchen</translation>
        </message>
        <message>
            <source>Loading the model</source>
            <translation>Modell wird geladen</translation>
        </message>
        <message>
            <source>Cancel loading</source>
            <translation>Laden abbrechen</translation>
        </message>
        <message>
            <source>Set as default</source>
            <translation>Als Standard festlegen</translation>
        </message>
        <message>
            <source>Open a model file…</source>
            <translation>Modelldatei öffnen…</translation>
        </message>
        <message>
            <source>Get more models…</source>
            <translation>Weitere Modelle holen…</translation>
        </message>
        <message>
            <source>Up, Down, Enter</source>
            <translation>Auf, Ab, Eingabe</translation>
        </message>
        <message>
            <source>Choose a model in the list, and load it</source>
            <translation>Ein Modell in der Liste wählen und laden</translation>
        </message>
        <message>
            <source>Remote servers</source>
            <translation>Andere Server</translation>
        </message>
        <message>
            <source>No model is on this PC yet.</source>
            <translation>Auf diesem PC ist noch kein Modell.</translation>
        </message>
        <message>
            <source>Looking for models…</source>
            <translation>Modelle werden gesucht…</translation>
        </message>
        <message>
            <source>No model has that name.</source>
            <translation>Kein Modell heißt so.</translation>
        </message>
        <message>
            <source>Use in this chat</source>
            <translation>In diesem Chat verwenden</translation>
        </message>
        <message>
            <source>Unload</source>
            <translation>Entladen</translation>
        </message>
        <message>
            <source>Load</source>
            <translation>Laden</translation>
        </message>
        <message>
            <source>Frees the memory that the model takes</source>
            <translation>Gibt den Speicher frei, den das Modell belegt</translation>
        </message>
        <message>
            <source>Use in new chats</source>
            <translation>In neuen Chats verwenden</translation>
        </message>
        <message>
            <source>New chats begin with it; chats that are there stay as they are</source>
            <translation>Neue Chats beginnen damit; vorhandene bleiben, wie sie sind</translation>
        </message>
        <message>
            <source>Loaded whenever Switchyard starts</source>
            <translation>Wird bei jedem Start von Switchyard geladen</translation>
        </message>
    </context>
    <context>
        <name>ModelTable</name>
        <message>
            <source>Load the model</source>
            <translation>Modell laden</translation>
        </message>
        <message>
            <source>Remove the model</source>
            <translation>Modell entfernen</translation>
        </message>
    </context>
    <context>
        <name>Models</name>
        <message>
            <source>Switchyard</source>
            <translation>Switchyard</translation>
        </message>
        <message>
            <source>Hub cache</source>
            <translation>Hub-Cache</translation>
        </message>
        <message>
            <source>Your folder</source>
            <translation>Ihr Ordner</translation>
        </message>
        <message>
            <source>also in {0}</source>
            <translation>auch in {0}</translation>
        </message>
        <message>
            <source>damaged</source>
            <translation>beschädigt</translation>
        </message>
        <message>
            <source>{0} tokens/s measured</source>
            <translation>{0} Token/s gemessen</translation>
        </message>
        <message>
            <source>about {0} tokens/s predicted</source>
            <translation>etwa {0} Token/s vorhergesagt</translation>
        </message>
        <message>
            <source>never</source>
            <translation>nie</translation>
        </message>
        <message>
            <source>today</source>
            <translation>heute</translation>
        </message>
        <message>
            <source>yesterday</source>
            <translation>gestern</translation>
        </message>
        <message numerus="yes">
            <source>{0} days ago</source>
            <translation>
                <numerusform>vor {0} Tag</numerusform>
                <numerusform>vor {0} Tagen</numerusform>
            </translation>
        </message>
        <message>
            <source>loaded</source>
            <translation>geladen</translation>
        </message>
        <message>
            <source>default</source>
            <translation>Standard</translation>
        </message>
        <message>
            <source>pictures</source>
            <translation>Bilder</translation>
        </message>
        <message>
            <source>tools</source>
            <translation>Werkzeuge</translation>
        </message>
        <message>
            <source>thinks</source>
            <translation>denkt nach</translation>
        </message>
        <message>
            <source>embeddings</source>
            <translation>Embeddings</translation>
        </message>
        <message>
            <source>Sees pictures</source>
            <translation>Sieht Bilder</translation>
        </message>
        <message>
            <source>Calls tools</source>
            <translation>Ruft Werkzeuge auf</translation>
        </message>
        <message>
            <source>Thinks first</source>
            <translation>Denkt zuerst nach</translation>
        </message>
        <message>
            <source>Embeds texts</source>
            <translation>Bettet Texte ein</translation>
        </message>
        <message>
            <source>last used: {0}</source>
            <translation>zuletzt genutzt: {0}</translation>
        </message>
        <message>
            <source>{0} B parameters</source>
            <translation>{0} Mrd. Parameter</translation>
        </message>
        <message>
            <source>{0} experts, {1} per token</source>
            <translation>{0} Experten, {1} pro Token</translation>
        </message>
        <message>
            <source>context {0}</source>
            <translation>Kontext {0}</translation>
        </message>
        <message>
            <source>used {0}</source>
            <translation>genutzt: {0}</translation>
        </message>
        <message>
            <source>converted weights {0}</source>
            <translation>umgewandelte Gewichte {0}</translation>
        </message>
        <message>
            <source>Verifying {0}</source>
            <translation>{0} wird geprüft</translation>
        </message>
        <message>
            <source>Moving {0}</source>
            <translation>{0} wird verschoben</translation>
        </message>
        <message>
            <source>Copying {0}</source>
            <translation>{0} wird kopiert</translation>
        </message>
        <message>
            <source>Importing {0}</source>
            <translation>{0} wird importiert</translation>
        </message>
        <message>
            <source>Removing {0}</source>
            <translation>{0} wird entfernt</translation>
        </message>
        <message>
            <source>Deleting the converted weights of {0}</source>
            <translation>Umgewandelte Gewichte von {0} werden gelöscht</translation>
        </message>
        <message>
            <source>{0} was imported.</source>
            <translation>{0} wurde importiert.</translation>
        </message>
        <message>
            <source>{0} is now in {1}.</source>
            <translation>{0} ist jetzt in {1}.</translation>
        </message>
        <message>
            <source>{0} was copied to {1}.</source>
            <translation>{0} wurde nach {1} kopiert.</translation>
        </message>
        <message>
            <source>{0} is in the trash ({1}).</source>
            <translation>{0} ist im Papierkorb ({1}).</translation>
        </message>
        <message>
            <source>Everything else in {0} stays there.</source>
            <translation>Was sonst in {0} liegt, bleibt dort.</translation>
        </message>
        <message>
            <source>{0} were freed; loading {1} converts its weights again.</source>
            <translation>{0} wurden frei; beim Laden wandelt {1} seine Gewichte wieder um.</translation>
        </message>
        <message>
            <source>{0} is damaged, download it again: {1}</source>
            <translation>{0} ist beschädigt, laden Sie es erneut herunter: {1}</translation>
        </message>
        <message>
            <source>{0} is intact: every file has its checksum.</source>
            <translation>{0} ist unversehrt: Jede Datei hat ihre Prüfsumme.</translation>
        </message>
        <message>
            <source>{0} is complete; there are no checksums to compare with.</source>
            <translation>{0} ist vollständig; es gibt keine Prüfsummen zum Vergleich.</translation>
        </message>
        <message>
            <source>Code</source>
            <translation>Code</translation>
        </message>
        <message>
            <source>Tools</source>
            <translation>Werkzeuge</translation>
        </message>
        <message>
            <source>Pictures</source>
            <translation>Bilder</translation>
        </message>
        <message>
            <source>Embeddings</source>
            <translation>Embeddings</translation>
        </message>
        <message>
            <source>Long documents</source>
            <translation>Lange Dokumente</translation>
        </message>
        <message>
            <source>Many languages</source>
            <translation>Viele Sprachen</translation>
        </message>
        <message>
            <source>{0} B parameters, {1} B for each token</source>
            <translation>{0} Mrd. Parameter, {1} Mrd. für jedes Token</translation>
        </message>
        <message>
            <source>{0} B</source>
            <translation>{0} Mrd.</translation>
        </message>
        <message>
            <source>gated</source>
            <translation>zugangsbeschränkt</translation>
        </message>
        <message>
            <source>{0} downloads</source>
            <translation>{0} Downloads</translation>
        </message>
        <message>
            <source>{0} M</source>
            <translation>{0} Mio.</translation>
        </message>
        <message>
            <source>{0} k</source>
            <translation>{0} Tsd.</translation>
        </message>
    </context>
    <context>
        <name>ModelsPage</name>
        <message>
            <source>Models</source>
            <translation>Modelle</translation>
        </message>
        <message>
            <source>Folders…</source>
            <translation>Ordner…</translation>
        </message>
        <message>
            <source>Import…</source>
            <translation>Importieren…</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>Schließen</translation>
        </message>
        <message>
            <source>It frees {0} once the trash is emptied. Its converted weights are deleted.</source>
            <translation>Gibt {0} frei, sobald der Papierkorb geleert ist. Umgewandelte Gewichte werden gelöscht.</translation>
        </message>
        <message>
            <source>This is the copy in {0}. The one in {1} stays, and is listed instead.</source>
            <translation>Dies ist die Kopie in {0}. Die in {1} bleibt und wird stattdessen aufgelistet.</translation>
        </message>
        <message>
            <source>Move {0} to the trash?</source>
            <translation>{0} in den Papierkorb legen?</translation>
        </message>
        <message>
            <source>Move to the trash</source>
            <translation>In den Papierkorb</translation>
        </message>
        <message>
            <source>Load {0} anyway?</source>
            <translation>{0} trotzdem laden?</translation>
        </message>
        <message>
            <source>Download {0} and load it</source>
            <translation>{0} herunterladen und laden</translation>
        </message>
        <message>
            <source>{0} is being downloaded; it goes on when you leave this page.</source>
            <translation>{0} wird heruntergeladen; das geht weiter, wenn Sie diese Seite verlassen.</translation>
        </message>
        <message>
            <source>{0} is on this PC now.</source>
            <translation>{0} ist jetzt auf diesem PC.</translation>
        </message>
        <message>
            <source>Load it</source>
            <translation>Laden</translation>
        </message>
        <message>
            <source>Folder to move it to</source>
            <translation>Zielordner</translation>
        </message>
        <message>
            <source>Folder for the copy</source>
            <translation>Ordner für die Kopie</translation>
        </message>
        <message>
            <source>Search the hub</source>
            <translation>Hub durchsuchen</translation>
        </message>
        <message>
            <source>Import a model</source>
            <translation>Modell importieren</translation>
        </message>
    </context>
    <context>
        <name>MonitorPage</name>
        <message>
            <source>Monitor</source>
            <translation>Monitor</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>Schließen</translation>
        </message>
        <message>
            <source>Back to live</source>
            <translation>Zurück zu live</translation>
        </message>
        <message>
            <source>Hide lanes and figures</source>
            <translation>Spuren und Werte ausblenden</translation>
        </message>
        <message>
            <source>Show lanes, caches and memory in detail</source>
            <translation>Spuren, Caches und Speicher im Einzelnen zeigen</translation>
        </message>
        <message>
            <source>A recorded session: {0}.</source>
            <translation>Eine aufgezeichnete Sitzung: {0}.</translation>
        </message>
        <message>
            <source>It ends early; everything intact is shown.</source>
            <translation>Sie endet vorzeitig; alles Unversehrte wird gezeigt.</translation>
        </message>
        <message>
            <source>Compared with</source>
            <translation>Verglichen mit</translation>
        </message>
    </context>
    <context>
        <name>NewJob</name>
        <message>
            <source>No model is loaded.</source>
            <translation>Kein Modell ist geladen.</translation>
        </message>
        <message>
            <source>The job starts when a model is loaded.</source>
            <translation>Der Auftrag beginnt, wenn ein Modell geladen ist.</translation>
        </message>
        <message>
            <source>A trial of the first rows says how long a row takes there, and what it costs.</source>
            <translation>Eine Probe der ersten Zeilen zeigt, wie lange eine Zeile dort dauert und was sie kostet.</translation>
        </message>
        <message>
            <source>Each node plans for itself; how fast it is shows when rows are answered.</source>
            <translation>Jeder Knoten plant für sich; wie schnell es geht, zeigt sich mit den ersten Antworten.</translation>
        </message>
    </context>
    <context>
        <name>NumbersCard</name>
        <message>
            <source>Measurements</source>
            <translation>Messwerte</translation>
        </message>
        <message>
            <source>Not measured yet. Numbers with “about” are assumed, from data sheets of similar hardware; measuring takes ten seconds.</source>
            <translation>Noch nicht gemessen. Zahlen mit „etwa“ sind Annahmen aus Datenblättern ähnlicher Hardware; eine Messung dauert zehn Sekunden.</translation>
        </message>
        <message>
            <source>quick</source>
            <translation>schnell</translation>
        </message>
        <message>
            <source>thorough</source>
            <translation>gründlich</translation>
        </message>
        <message>
            <source>Measured on {0}, {1}. The best of each kind:</source>
            <translation>Gemessen am {0}, {1}. Die besten Werte jeder Art:</translation>
        </message>
        <message>
            <source>Skipped: {0} ({1}).</source>
            <translation>Übersprungen: {0} ({1}).</translation>
        </message>
        <message>
            <source>{0} varied by {1}% in every repeat.</source>
            <translation>{0} schwankte in jeder Wiederholung um {1} %.</translation>
        </message>
        <message>
            <source>Each is measured several times; the best of each kind so far:</source>
            <translation>Jeder wird mehrmals gemessen; die bisher besten Werte jeder Art:</translation>
        </message>
        <message>
            <source>Numbers appear here as they are measured.</source>
            <translation>Die Zahlen erscheinen hier, sobald sie gemessen sind.</translation>
        </message>
    </context>
    <context>
        <name>OfferView</name>
        <message>
            <source>≈ Size from the catalogue, not checked with the hub.</source>
            <translation>≈ Größe laut Katalog, nicht mit dem Hub abgeglichen.</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>Herunterladen</translation>
        </message>
        <message>
            <source>All files…</source>
            <translation>Alle Dateien…</translation>
        </message>
        <message>
            <source>All files of {0}</source>
            <translation>Alle Dateien von {0}</translation>
        </message>
    </context>
    <context>
        <name>OnThisPcCard</name>
        <message>
            <source>On this PC</source>
            <translation>Auf diesem PC</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modell</translation>
        </message>
        <message>
            <source>From</source>
            <translation>Von</translation>
        </message>
        <message>
            <source>Size</source>
            <translation>Größe</translation>
        </message>
        <message>
            <source>Precision</source>
            <translation>Genauigkeit</translation>
        </message>
        <message>
            <source>Tokens/s</source>
            <translation>Token/s</translation>
        </message>
        <message>
            <source>Used</source>
            <translation>Genutzt</translation>
        </message>
        <message>
            <source>What a model can do</source>
            <translation>Was ein Modell kann</translation>
        </message>
        <message>
            <source>Any ability</source>
            <translation>Alle Fähigkeiten</translation>
        </message>
        <message>
            <source>Models on this PC</source>
            <translation>Modelle auf diesem PC</translation>
        </message>
        <message>
            <source>Load</source>
            <translation>Laden</translation>
        </message>
        <message>
            <source>Unload</source>
            <translation>Entladen</translation>
        </message>
        <message>
            <source>Set as default</source>
            <translation>Als Standard festlegen</translation>
        </message>
        <message>
            <source>More</source>
            <translation>Mehr</translation>
        </message>
        <message>
            <source>Verify files</source>
            <translation>Dateien prüfen</translation>
        </message>
        <message>
            <source>Show in folder</source>
            <translation>Im Ordner anzeigen</translation>
        </message>
        <message>
            <source>Move to another folder…</source>
            <translation>In anderen Ordner verschieben…</translation>
        </message>
        <message>
            <source>Export a copy…</source>
            <translation>Kopie exportieren…</translation>
        </message>
        <message>
            <source>Remove…</source>
            <translation>Entfernen…</translation>
        </message>
        <message>
            <source>No model is here yet: take one that suits this PC.</source>
            <translation>Hier ist noch kein Modell: Nehmen Sie eines, das zu diesem PC passt.</translation>
        </message>
        <message>
            <source>No model here can do that.</source>
            <translation>Kein Modell hier ist so gekennzeichnet.</translation>
        </message>
        <message>
            <source>1 model</source>
            <translation>1 Modell</translation>
        </message>
        <message numerus="yes">
            <source>{0} models</source>
            <translation>
                <numerusform>{0} Modell</numerusform>
                <numerusform>{0} Modelle</numerusform>
            </translation>
        </message>
        <message>
            <source>Default</source>
            <translation>Standard</translation>
        </message>
        <message>
            <source>Delete converted weights ({0})</source>
            <translation>Umgewandelte Gewichte löschen ({0})</translation>
        </message>
        <message>
            <source>Unload it first.</source>
            <translation>Entladen Sie es zuerst.</translation>
        </message>
        <message>
            <source>It is used where it lies: remove it there.</source>
            <translation>Es wird dort genutzt, wo es liegt: Entfernen Sie es dort.</translation>
        </message>
    </context>
    <context>
        <name>OtherProgramsCard</name>
        <message>
            <source>How programs reach it</source>
            <translation>Wie Programme ihn erreichen</translation>
        </message>
        <message>
            <source>Copy address</source>
            <translation>Adresse kopieren</translation>
        </message>
        <message>
            <source>Address</source>
            <translation>Adresse</translation>
        </message>
        <message>
            <source>Show</source>
            <translation>Anzeigen</translation>
        </message>
        <message>
            <source>Show the key</source>
            <translation>Schlüssel anzeigen</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>Kopieren</translation>
        </message>
        <message>
            <source>Copy the key</source>
            <translation>Schlüssel kopieren</translation>
        </message>
        <message>
            <source>New key</source>
            <translation>Neuer Schlüssel</translation>
        </message>
        <message>
            <source>Free</source>
            <translation>Freigeben</translation>
        </message>
        <message>
            <source>Models asked for by name</source>
            <translation>Namentlich angeforderte Modelle</translation>
        </message>
        <message>
            <source>Copy example</source>
            <translation>Beispiel kopieren</translation>
        </message>
        <message>
            <source>OpenAI's interface is at /v1; programs for Anthropic or Ollama take the address alone.</source>
            <translation>Die Schnittstelle von OpenAI liegt unter /v1; Programme für Anthropic oder Ollama nehmen nur die Adresse.</translation>
        </message>
        <message>
            <source>Example</source>
            <translation>Beispiel</translation>
        </message>
        <message>
            <source>Requests</source>
            <translation>Anfragen</translation>
        </message>
        <message>
            <source>Key</source>
            <translation>Schlüssel</translation>
        </message>
        <message>
            <source>Off. Nothing listens, and no editor, agent or other app can ask.</source>
            <translation>Aus. Nichts lauscht, und kein Editor, Agent oder anderes Programm kann fragen.</translation>
        </message>
        <message>
            <source>Starting…</source>
            <translation>Wird gestartet…</translation>
        </message>
        <message>
            <source>On, for all models on this PC. Chats in this window come first.</source>
            <translation>Ein, für alle Modelle auf diesem PC. Chats in diesem Fenster haben Vorrang.</translation>
        </message>
        <message>
            <source>Off, because of a problem.</source>
            <translation>Aus, wegen eines Problems.</translation>
        </message>
        <message>
            <source>No other PC can reach it. Any program here can.</source>
            <translation>Kein anderer PC erreicht ihn. Jedes Programm hier kann es.</translation>
        </message>
        <message>
            <source>No other PC can reach it. Programs here need the key.</source>
            <translation>Kein anderer PC erreicht ihn. Programme hier brauchen den Schlüssel.</translation>
        </message>
        <message>
            <source>What is asked and answered crosses your network unencrypted: use it only at home.</source>
            <translation>Fragen und Antworten laufen unverschlüsselt durch Ihr Netzwerk: Nutzen Sie dies nur zu Hause.</translation>
        </message>
        <message>
            <source>{0} is being loaded.</source>
            <translation>{0} wird geladen.</translation>
        </message>
        <message>
            <source>{0} is loaded.</source>
            <translation>{0} ist geladen.</translation>
        </message>
        <message>
            <source>Any model on this PC: it is loaded beside yours, one at a time.</source>
            <translation>Jedes Modell auf diesem PC: Es wird neben Ihrem geladen, eines zur Zeit.</translation>
        </message>
        <message>
            <source>In the system's keyring.</source>
            <translation>Im Schlüsselbund des Systems.</translation>
        </message>
        <message>
            <source>For this run only: this system has no keyring.</source>
            <translation>Nur bis zum Beenden: Dieses System hat keinen Schlüsselbund.</translation>
        </message>
        <message>
            <source>Since the window opened; what was asked and answered is not kept.</source>
            <translation>Seit das Fenster geöffnet ist; Fragen und Antworten werden nicht behalten.</translation>
        </message>
        <message>
            <source>None yet.</source>
            <translation>Noch keine.</translation>
        </message>
    </context>
    <context>
        <name>OutputCard</name>
        <message>
            <source>Result file</source>
            <translation>Ergebnisdatei</translation>
        </message>
        <message>
            <source>Name of the result file</source>
            <translation>Name der Ergebnisdatei</translation>
        </message>
        <message>
            <source>File type</source>
            <translation>Dateityp</translation>
        </message>
        <message>
            <source>Another folder…</source>
            <translation>Anderer Ordner…</translation>
        </message>
        <message>
            <source>In</source>
            <translation>In</translation>
        </message>
        <message>
            <source>In OpenAI's output format; rows that fail go into an error file beside it.</source>
            <translation>Im Ausgabeformat von OpenAI; fehlgeschlagene Zeilen kommen in eine Fehlerdatei daneben.</translation>
        </message>
        <message>
            <source>Keeps the input's columns; adds the answer, how it ended, token counts and, for failed rows, why.</source>
            <translation>Behält die Spalten der Eingabe; fügt die Antwort, ihr Ende, Token-Zahlen und bei fehlgeschlagenen Zeilen den Grund hinzu.</translation>
        </message>
        <message>
            <source>Name the result file.</source>
            <translation>Geben Sie der Ergebnisdatei einen Namen.</translation>
        </message>
        <message>
            <source>The result file's name contains a slash: choose the folder beside it instead.</source>
            <translation>Der Name der Ergebnisdatei enthält einen Schrägstrich: Wählen Sie stattdessen daneben den Ordner.</translation>
        </message>
        <message>
            <source>Folder of the result file</source>
            <translation>Ordner der Ergebnisdatei</translation>
        </message>
    </context>
    <context>
        <name>Pages</name>
        <message>
            <source>Chat</source>
            <translation>Chat</translation>
        </message>
        <message>
            <source>Batch</source>
            <translation>Stapel</translation>
        </message>
        <message>
            <source>Monitor</source>
            <translation>Monitor</translation>
        </message>
        <message>
            <source>Tune</source>
            <translation>Optimieren</translation>
        </message>
        <message>
            <source>Models</source>
            <translation>Modelle</translation>
        </message>
        <message>
            <source>Settings</source>
            <translation>Einstellungen</translation>
        </message>
        <message>
            <source>Choose a first model</source>
            <translation>Erstes Modell wählen</translation>
        </message>
    </context>
    <context>
        <name>PassageDialog</name>
        <message>
            <source>Source {0}</source>
            <translation>Quelle {0}</translation>
        </message>
        <message>
            <source>Document</source>
            <translation>Dokument</translation>
        </message>
        <message>
            <source>The passage and what stands around it</source>
            <translation>Die Stelle und was um sie herum steht</translation>
        </message>
        <message>
            <source>Looking for the passage…</source>
            <translation>Die Stelle wird gesucht…</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>Schließen</translation>
        </message>
        <message>
            <source>This passage is no longer there: the document has changed or was removed since.</source>
            <translation>Diese Stelle gibt es nicht mehr: Das Dokument wurde seither geändert oder entfernt.</translation>
        </message>
    </context>
    <context>
        <name>PictureRow</name>
        <message>
            <source>Remove picture {0}</source>
            <translation>Bild {0} entfernen</translation>
        </message>
        <message>
            <source>damaged picture</source>
            <translation>beschädigtes Bild</translation>
        </message>
        <message>
            <source>Picture {0} of {1}</source>
            <translation>Bild {0} von {1}</translation>
        </message>
        <message>
            <source>{0}, {1} by {2} pixels</source>
            <translation>{0}, {1} mal {2} Pixel</translation>
        </message>
    </context>
    <context>
        <name>Pictures</name>
        <message>
            <source>A message takes up to {0} pictures.</source>
            <translation>Eine Nachricht fasst bis zu {0} Bilder.</translation>
        </message>
        <message>
            <source>A chat takes {0} of pictures: start a new chat for more.</source>
            <translation>Ein Chat fasst {0} an Bildern: Beginnen Sie für mehr einen neuen Chat.</translation>
        </message>
        <message>
            <source>{0} is not a file.</source>
            <translation>{0} ist keine Datei.</translation>
        </message>
        <message>
            <source>{0} cannot be read ({1}).</source>
            <translation>{0} kann nicht gelesen werden ({1}).</translation>
        </message>
        <message>
            <source>{0} is larger than {1}: make it smaller first.</source>
            <translation>{0} ist größer als {1}: Verkleinern Sie es zuerst.</translation>
        </message>
        <message>
            <source>{0} is damaged and cannot be shown.</source>
            <translation>{0} ist beschädigt und kann nicht angezeigt werden.</translation>
        </message>
        <message>
            <source>{0} is in the {1} format, which is not read here: save it as PNG or JPEG.</source>
            <translation>{0} hat das Format {1}, das hier nicht gelesen wird: Speichern Sie das Bild als PNG oder JPEG.</translation>
        </message>
        <message>
            <source>{0} is not a PNG, JPEG, WebP or GIF picture.</source>
            <translation>{0} ist kein Bild im Format PNG, JPEG, WebP oder GIF.</translation>
        </message>
        <message>
            <source>{0} has too many pixels: make it smaller first.</source>
            <translation>{0} hat zu viele Pixel: Verkleinern Sie es zuerst.</translation>
        </message>
    </context>
    <context>
        <name>PlaceRows</name>
        <message>
            <source>Who answers the rows</source>
            <translation>Wer die Zeilen beantwortet</translation>
        </message>
        <message>
            <source>1 row</source>
            <translation>1 Zeile</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows</source>
            <translation>
                <numerusform>{0} Zeile</numerusform>
                <numerusform>{0} Zeilen</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>PlacesCard</name>
        <message>
            <source>Answered by</source>
            <translation>Beantwortet von</translation>
        </message>
        <message>
            <source>Ask two for slow last rows</source>
            <translation>Bei langsamen letzten Zeilen zwei fragen</translation>
        </message>
        <message>
            <source>Near the end, a row that one server is slow with is asked of another as well, which costs tokens.</source>
            <translation>Gegen Ende wird eine Zeile, die bei einem Server lange dauert, auch einem anderen gestellt; das kostet Token.</translation>
        </message>
        <message>
            <source>Add a column that says who answered</source>
            <translation>Spalte hinzufügen, die sagt, wer geantwortet hat</translation>
        </message>
        <message>
            <source>A Ray cluster at</source>
            <translation>Ein Ray-Cluster unter</translation>
        </message>
        <message>
            <source>Each of its nodes answers rows with the model that is loaded here.</source>
            <translation>Jeder seiner Knoten beantwortet Zeilen mit dem Modell, das hier geladen ist.</translation>
        </message>
        <message>
            <source>Address of the Ray cluster</source>
            <translation>Adresse des Ray-Clusters</translation>
        </message>
        <message>
            <source>auto, or 10.0.0.5:6379</source>
            <translation>auto oder 10.0.0.5:6379</translation>
        </message>
        <message>
            <source>This PC</source>
            <translation>Dieser PC</translation>
        </message>
        <message>
            <source>Give the address of the Ray cluster, or auto for the one of this PC.</source>
            <translation>Geben Sie die Adresse des Ray-Clusters an, oder auto für den dieses PCs.</translation>
        </message>
        <message>
            <source>Choose who answers the rows.</source>
            <translation>Wählen Sie, wer die Zeilen beantwortet.</translation>
        </message>
    </context>
    <context>
        <name>PlanBars</name>
        <message>
            <source>experts, {0} slots</source>
            <translation>Experten, {0} Plätze</translation>
        </message>
        <message>
            <source>experts</source>
            <translation>Experten</translation>
        </message>
        <message>
            <source>model</source>
            <translation>Modell</translation>
        </message>
        <message>
            <source>loading buffers</source>
            <translation>Ladepuffer</translation>
        </message>
        <message>
            <source>chat memory</source>
            <translation>Chat-Speicher</translation>
        </message>
        <message>
            <source>working memory</source>
            <translation>Arbeitsspeicher</translation>
        </message>
        <message>
            <source>reading pictures</source>
            <translation>Bilder lesen</translation>
        </message>
        <message>
            <source>safety margin</source>
            <translation>Sicherheitsreserve</translation>
        </message>
        <message>
            <source>other programs</source>
            <translation>andere Programme</translation>
        </message>
        <message>
            <source>Memory by tier</source>
            <translation>Speicher nach Stufe</translation>
        </message>
        <message>
            <source>under {0}</source>
            <translation>unter {0}</translation>
        </message>
        <message>
            <source>free</source>
            <translation>frei</translation>
        </message>
        <message>
            <source>{0} GB</source>
            <translation>{0} GB</translation>
        </message>
        <message>
            <source>{0} of {1} GB</source>
            <translation>{0} von {1} GB</translation>
        </message>
    </context>
    <context>
        <name>PlanCard</name>
        <message>
            <source>Plan</source>
            <translation>Plan</translation>
        </message>
        <message>
            <source>Planning…</source>
            <translation>Plan wird berechnet…</translation>
        </message>
        <message>
            <source>{0} {1}: {2}</source>
            <translation>{0} {1}: {2}</translation>
        </message>
        <message>
            <source>Alternatives, in tokens/s: {0}.</source>
            <translation>Alternativen, in Token/s: {0}.</translation>
        </message>
        <message>
            <source>Plan for {0}</source>
            <translation>Plan für {0}</translation>
        </message>
    </context>
    <context>
        <name>PlanTable</name>
        <message>
            <source>Plan</source>
            <translation>Plan</translation>
        </message>
        <message>
            <source>Predicted</source>
            <translation>Prognose</translation>
        </message>
        <message>
            <source>Timed</source>
            <translation>Gemessen</translation>
        </message>
        <message>
            <source>Tokens/s</source>
            <translation>Token/s</translation>
        </message>
        <message>
            <source>predicted {0} tokens/s ({1} to {2})</source>
            <translation>vorhergesagt {0} Token/s ({1} bis {2})</translation>
        </message>
        <message>
            <source>timed {0} tokens/s</source>
            <translation>gemessen {0} Token/s</translation>
        </message>
        <message>
            <source>{2} runs from {0} to {1}</source>
            <translation>{2} Läufe von {0} bis {1}</translation>
        </message>
        <message>
            <source>first token after {0} s</source>
            <translation>erstes Token nach {0} s</translation>
        </message>
        <message>
            <source>winner</source>
            <translation>Sieger</translation>
        </message>
        <message>
            <source>the plan</source>
            <translation>der Plan</translation>
        </message>
        <message>
            <source>as it ran before</source>
            <translation>wie bisher</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>Fehler</translation>
        </message>
    </context>
    <context>
        <name>PoliciesCard</name>
        <message>
            <source>Policies</source>
            <translation>Strategien</translation>
        </message>
        <message>
            <source>Cache policies</source>
            <translation>Cache-Strategien</translation>
        </message>
        <message>
            <source>When the cache is full, a policy decides which expert to evict for the next one. Each is tested on the model's actual requests; its share of hits (experts found in the cache) shows how well it would do.</source>
            <translation>Wenn der Cache voll ist, entscheidet eine Strategie, welcher Experte dem nächsten weicht. Jede wird an den tatsächlichen Anfragen des Modells getestet; ihr Anteil an Treffern (Experten, die im Cache lagen) zeigt, wie gut sie wäre.</translation>
        </message>
        <message>
            <source>recent hit rate, each on its own</source>
            <translation>aktuelle Trefferquote, jede für sich</translation>
        </message>
        <message>
            <source>All are simulated on the live routing; the one with the most hits is adopted.</source>
            <translation>Alle werden am laufenden Routing simuliert; die mit den meisten Treffern wird übernommen.</translation>
        </message>
        <message>
            <source>The policy is set in the settings; the others are simulated.</source>
            <translation>Die Strategie ist in den Einstellungen festgelegt; die anderen werden simuliert.</translation>
        </message>
        <message>
            <source>{0}%</source>
            <translation>{0} %</translation>
        </message>
        <message>
            <source>{0} in use</source>
            <translation>{0} in Gebrauch</translation>
        </message>
    </context>
    <context>
        <name>PredictButton</name>
        <message>
            <source>Predicted</source>
            <translation>Vorhergesagt</translation>
        </message>
        <message>
            <source>The simulator's prediction for this request, below the recording</source>
            <translation>Die Vorhersage des Simulators für diese Anfrage, unter der Aufzeichnung</translation>
        </message>
        <message>
            <source>Show the predicted timeline</source>
            <translation>Vorhergesagte Zeitleiste zeigen</translation>
        </message>
        <message>
            <source>Nothing to predict yet: ask something in Chat first.</source>
            <translation>Noch nichts vorherzusagen: Fragen Sie zuerst etwas im Chat.</translation>
        </message>
        <message>
            <source>the model's files could not be read</source>
            <translation>die Dateien des Modells konnten nicht gelesen werden</translation>
        </message>
        <message>
            <source>No prediction: {0}</source>
            <translation>Keine Vorhersage: {0}</translation>
        </message>
    </context>
    <context>
        <name>Predicted</name>
        <message>
            <source>{0} tokens/s predicted</source>
            <translation>{0} Token/s vorhergesagt</translation>
        </message>
        <message>
            <source>{0} measured</source>
            <translation>{0} gemessen</translation>
        </message>
        <message>
            <source>first token after {0}</source>
            <translation>erstes Token nach {0}</translation>
        </message>
        <message>
            <source>Simulated for {0} tokens read and {1} written, aligned at the same step.</source>
            <translation>Simuliert für {0} gelesene und {1} geschriebene Token, am selben Schritt ausgerichtet.</translation>
        </message>
        <message>
            <source>Measured here: {0}.</source>
            <translation>Hier gemessen: {0}.</translation>
        </message>
        <message>
            <source>From data sheets, not measured by Tune: {0}.</source>
            <translation>Aus Datenblättern, nicht von „Optimieren“ gemessen: {0}.</translation>
        </message>
        <message>
            <source>Assumed: typical expert popularity, so that {0} slots hit {1}%;</source>
            <translation>Angenommen: typische Beliebtheit der Experten, sodass {0} Plätze {1} % treffen;</translation>
        </message>
        <message>
            <source>Assumed: typical expert popularity;</source>
            <translation>Angenommen: typische Beliebtheit der Experten;</translation>
        </message>
        <message>
            <source>no other program is running.</source>
            <translation>kein anderes Programm läuft.</translation>
        </message>
        <message>
            <source>processor and RAM</source>
            <translation>Prozessor und RAM</translation>
        </message>
        <message>
            <source>graphics card</source>
            <translation>Grafikkarte</translation>
        </message>
        <message>
            <source>PCIe</source>
            <translation>PCIe</translation>
        </message>
        <message>
            <source>disk</source>
            <translation>Datenträger</translation>
        </message>
    </context>
    <context>
        <name>PredictionCard</name>
        <message>
            <source>Prefetching</source>
            <translation>Vorabladen</translation>
        </message>
        <message>
            <source>Prefetching copies experts before they are needed, guessing which will be. A right guess saves a miss, a wait for memory; a wrong one costs a useless copy.</source>
            <translation>Beim Vorabladen werden Experten kopiert, bevor sie gebraucht werden; welche, wird geraten. Richtig geraten spart einen Fehlzugriff, also das Warten auf den Speicher; falsch geraten kostet eine nutzlose Kopie.</translation>
        </message>
        <message>
            <source>In use: {0}, one layer ahead.</source>
            <translation>In Gebrauch: {0}, eine Schicht voraus.</translation>
        </message>
        <message numerus="yes">
            <source>In use: {0}, {1} layers ahead.</source>
            <translation>
                <numerusform>In Gebrauch: {0}, {1} Schicht voraus.</numerusform>
                <numerusform>In Gebrauch: {0}, {1} Schichten voraus.</numerusform>
            </translation>
        </message>
        <message>
            <source>None is in use: no predictor would save more than it costs.</source>
            <translation>Keiner ist in Gebrauch: Kein Vorhersager würde mehr sparen, als er kostet.</translation>
        </message>
        <message>
            <source>Nothing is predicted on this model and machine: experts are fetched on a miss.</source>
            <translation>Bei diesem Modell und Rechner wird nichts vorhergesagt: Experten werden bei einem Fehlzugriff geholt.</translation>
        </message>
        <message>
            <source>Predictor</source>
            <translation>Vorhersager</translation>
        </message>
        <message>
            <source>predicted</source>
            <translation>vorhergesagt</translation>
        </message>
        <message>
            <source>right</source>
            <translation>richtig</translation>
        </message>
        <message>
            <source>gain</source>
            <translation>Gewinn</translation>
        </message>
        <message>
            <source>{0} ms</source>
            <translation>{0} ms</translation>
        </message>
        <message>
            <source>Share of the missing experts that was predicted</source>
            <translation>Anteil der fehlenden Experten, der vorhergesagt war</translation>
        </message>
        <message>
            <source>Share of the predicted, missing experts that was needed</source>
            <translation>Anteil der vorhergesagten, fehlenden Experten, der gebraucht wurde</translation>
        </message>
        <message>
            <source>Milliseconds its use would save per step, net of its cost</source>
            <translation>Millisekunden, die er pro Schritt sparen würde, abzüglich seiner Kosten</translation>
        </message>
        <message>
            <source>used</source>
            <translation>genutzt</translation>
        </message>
        <message>
            <source>wasted</source>
            <translation>vergeblich</translation>
        </message>
        <message>
            <source>{0}: of {1} prefetched, {2} used, {3} wasted (hatched), the rest waits.</source>
            <translation>{0}: von {1} vorab geladenen {2} genutzt, {3} vergeblich (schraffiert), der Rest wartet.</translation>
        </message>
        <message>
            <source>{0}%</source>
            <translation>{0} %</translation>
        </message>
    </context>
    <context>
        <name>ProgressCard</name>
        <message>
            <source>Job progress</source>
            <translation>Fortschritt des Auftrags</translation>
        </message>
    </context>
    <context>
        <name>PromptPopover</name>
        <message>
            <source>Saved prompts</source>
            <translation>Gespeicherte Prompts</translation>
        </message>
        <message>
            <source>Find a prompt</source>
            <translation>Prompt suchen</translation>
        </message>
        <message>
            <source>/</source>
            <translation>/</translation>
        </message>
        <message>
            <source>Saved prompts, in an empty message</source>
            <translation>Gespeicherte Prompts, in einer leeren Nachricht</translation>
        </message>
        <message>
            <source>Save this message…</source>
            <translation>Diese Nachricht speichern…</translation>
        </message>
        <message>
            <source>New…</source>
            <translation>Neu…</translation>
        </message>
        <message>
            <source>Edit…</source>
            <translation>Bearbeiten…</translation>
        </message>
        <message>
            <source>Delete</source>
            <translation>Löschen</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>Rückgängig</translation>
        </message>
        <message>
            <source>No saved prompt has these words.</source>
            <translation>Kein gespeicherter Prompt enthält diese Wörter.</translation>
        </message>
        <message>
            <source>Nothing is saved yet. A saved prompt is a message to use again; where it says {{topic}}, you are asked for the topic each time.</source>
            <translation>Noch ist nichts gespeichert. Ein gespeicherter Prompt ist eine Nachricht zum Wiederverwenden; wo darin {{topic}} steht, werden Sie jedes Mal nach „topic“ gefragt.</translation>
        </message>
        <message>
            <source>Insert</source>
            <translation>Einfügen</translation>
        </message>
        <message>
            <source>Back</source>
            <translation>Zurück</translation>
        </message>
        <message>
            <source>Name of the prompt</source>
            <translation>Name des Prompts</translation>
        </message>
        <message>
            <source>Name</source>
            <translation>Name</translation>
        </message>
        <message>
            <source>Prompt</source>
            <translation>Prompt</translation>
        </message>
        <message>
            <source>Summarise {{text}} in {{number}} sentences.</source>
            <translation>Fasse {{text}} in {{number}} Sätzen zusammen.</translation>
        </message>
        <message>
            <source>A name between double braces, such as {{topic}}, is asked for each time.</source>
            <translation>Nach einem Namen in doppelten geschweiften Klammern, wie {{topic}}, wird jedes Mal gefragt.</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>Speichern</translation>
        </message>
        <message>
            <source>Another prompt has this name: saving replaces it.</source>
            <translation>Ein anderer Prompt heißt so: Beim Speichern wird er ersetzt.</translation>
        </message>
    </context>
    <context>
        <name>QuickPrompt</name>
        <message>
            <source>Quick question</source>
            <translation>Schnelle Frage</translation>
        </message>
        <message>
            <source>Ask something</source>
            <translation>Stellen Sie eine Frage</translation>
        </message>
        <message>
            <source>Question</source>
            <translation>Frage</translation>
        </message>
        <message>
            <source>Enter asks, Shift+Enter starts a new line, Esc closes</source>
            <translation>Eingabe fragt, Umschalt+Eingabe beginnt eine neue Zeile, Esc schließt</translation>
        </message>
        <message>
            <source>Answer</source>
            <translation>Antwort</translation>
        </message>
        <message>
            <source>Open in Switchyard</source>
            <translation>In Switchyard öffnen</translation>
        </message>
        <message>
            <source>The server that answers new chats is not in the list: choose another model.</source>
            <translation>Der Server, der neue Chats beantwortet, ist nicht in der Liste: Wählen Sie ein anderes Modell.</translation>
        </message>
        <message>
            <source>This would go to {0}: send a chat there from Switchyard first.</source>
            <translation>Dies ginge an {0}: Senden Sie zuerst einen Chat von Switchyard aus dorthin.</translation>
        </message>
        <message>
            <source>Waiting for the answer…</source>
            <translation>Auf die Antwort wird gewartet…</translation>
        </message>
        <message>
            <source>Thinking…</source>
            <translation>Denkt nach…</translation>
        </message>
        <message>
            <source>The engine is not running: open Switchyard to restart it.</source>
            <translation>Die Engine läuft nicht: Öffnen Sie Switchyard, um sie neu zu starten.</translation>
        </message>
        <message>
            <source>No model is loaded: open Switchyard to choose one.</source>
            <translation>Kein Modell ist geladen: Öffnen Sie Switchyard, um eines zu wählen.</translation>
        </message>
        <message>
            <source>The model is loading; the answer follows.</source>
            <translation>Das Modell wird geladen; die Antwort folgt.</translation>
        </message>
        <message>
            <source>Waiting for another answer…</source>
            <translation>Auf eine andere Antwort wird gewartet…</translation>
        </message>
        <message>
            <source>Stop</source>
            <translation>Stoppen</translation>
        </message>
        <message>
            <source>Ask</source>
            <translation>Fragen</translation>
        </message>
    </context>
    <context>
        <name>RaceCard</name>
        <message>
            <source>Timed on the real engine</source>
            <translation>Mit der echten Engine gemessen</translation>
        </message>
        <message>
            <source>Nothing timed yet: “Tune” times the best plans and the current settings with real tokens.</source>
            <translation>Noch nichts gemessen: „Optimieren“ misst die besten Pläne und die jetzigen Einstellungen mit echten Token.</translation>
        </message>
        <message>
            <source>Use winner now</source>
            <translation>Sieger jetzt verwenden</translation>
        </message>
        <message>
            <source>Keep as before</source>
            <translation>Wie zuvor</translation>
        </message>
        <message>
            <source>Bars: measured, which is what counts. Brackets: the predicted range.</source>
            <translation>Balken: gemessen, und das zählt. Klammern: der vorhergesagte Bereich.</translation>
        </message>
        <message>
            <source>{0}, {1}</source>
            <translation>{0}, {1}</translation>
        </message>
        <message>
            <source>Before {0} → after {1} tokens/s</source>
            <translation>Vorher {0} → nachher {1} Token/s</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} Token/s</translation>
        </message>
        <message>
            <source>This model now runs with it: {0}, {1} tokens/s.</source>
            <translation>Dieses Modell läuft jetzt damit: {0}, {1} Token/s.</translation>
        </message>
        <message>
            <source>This model has since run at {0} tokens/s, much faster than the {1} timed here: the machine was busy then. Plans no longer use these figures. Tune again.</source>
            <translation>Dieses Modell lief seither mit {0} Token/s, viel schneller als die hier gemessenen {1}: Der Rechner war damals beschäftigt. Pläne verwenden diese Zahlen nicht mehr. Optimieren Sie erneut.</translation>
        </message>
        <message>
            <source>Other programs used {0}% of the CPU while this was timed: every figure is too low, and the wrong plan may have won. Plans do not use these figures. Tune again when those programs have finished.</source>
            <translation>Während der Messung nutzten andere Programme {0} % der CPU: Alle Zahlen sind zu niedrig, und vielleicht gewann der falsche Plan. Pläne verwenden diese Zahlen nicht. Optimieren Sie erneut, wenn jene Programme fertig sind.</translation>
        </message>
    </context>
    <context>
        <name>RaceDelegate</name>
        <message>
            <source>waits</source>
            <translation>wartet</translation>
        </message>
    </context>
    <context>
        <name>RaceView</name>
        <message>
            <source>Plans, predicted and measured</source>
            <translation>Pläne, vorhergesagt und gemessen</translation>
        </message>
    </context>
    <context>
        <name>RangeBar</name>
        <message>
            <source>10 s</source>
            <translation>10 s</translation>
        </message>
        <message>
            <source>Show 10 seconds</source>
            <translation>10 Sekunden zeigen</translation>
        </message>
        <message>
            <source>60 s</source>
            <translation>60 s</translation>
        </message>
        <message>
            <source>Show 60 seconds</source>
            <translation>60 Sekunden zeigen</translation>
        </message>
        <message>
            <source>5 min</source>
            <translation>5 min</translation>
        </message>
        <message>
            <source>Show 5 minutes</source>
            <translation>5 Minuten zeigen</translation>
        </message>
        <message>
            <source>Session</source>
            <translation>Sitzung</translation>
        </message>
        <message>
            <source>Show the whole session</source>
            <translation>Ganze Sitzung zeigen</translation>
        </message>
        <message>
            <source>Freeze</source>
            <translation>Anhalten</translation>
        </message>
        <message>
            <source>Frozen</source>
            <translation>Angehalten</translation>
        </message>
        <message>
            <source>Space freezes</source>
            <translation>Leertaste hält an</translation>
        </message>
        <message>
            <source>Frozen: Home follows</source>
            <translation>Angehalten: Pos1 folgt</translation>
        </message>
        <message>
            <source>Space freezes the view; recording continues</source>
            <translation>Leertaste hält die Ansicht an; die Aufzeichnung läuft weiter</translation>
        </message>
        <message>
            <source>Home follows live data</source>
            <translation>Pos1 folgt den Live-Daten</translation>
        </message>
        <message>
            <source>Freeze the view; recording continues</source>
            <translation>Ansicht anhalten; die Aufzeichnung läuft weiter</translation>
        </message>
        <message>
            <source>Follow live data</source>
            <translation>Live-Daten folgen</translation>
        </message>
    </context>
    <context>
        <name>RecommendationList</name>
        <message>
            <source>≈ Size from the catalogue, not checked with the hub.</source>
            <translation>≈ Größe laut Katalog, nicht mit dem Hub abgeglichen.</translation>
        </message>
    </context>
    <context>
        <name>RecommendationRow</name>
        <message>
            <source>Download</source>
            <translation>Herunterladen</translation>
        </message>
    </context>
    <context>
        <name>Recommendations</name>
        <message>
            <source>Fast</source>
            <translation>Schnell</translation>
        </message>
        <message>
            <source>Balanced</source>
            <translation>Ausgewogen</translation>
        </message>
        <message>
            <source>Best that fits</source>
            <translation>Bestes, das passt</translation>
        </message>
        <message>
            <source>on this PC</source>
            <translation>auf diesem PC</translation>
        </message>
        <message>
            <source>first answer in about {0}</source>
            <translation>erste Antwort in etwa {0}</translation>
        </message>
        <message>
            <source>first answer in about {0} at 100 Mbit/s</source>
            <translation>erste Antwort in etwa {0} bei 100 Mbit/s</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>Herunterladen</translation>
        </message>
        <message>
            <source>Downloading</source>
            <translation>Wird heruntergeladen</translation>
        </message>
        <message>
            <source>Load</source>
            <translation>Laden</translation>
        </message>
    </context>
    <context>
        <name>Report</name>
        <message>
            <source>Save a report</source>
            <translation>Bericht speichern</translation>
        </message>
        <message>
            <source>Text (*.txt)</source>
            <translation>Text (*.txt)</translation>
        </message>
    </context>
    <context>
        <name>Resizing</name>
        <message>
            <source>Requested {0} experts…</source>
            <translation>{0} Experten angefordert…</translation>
        </message>
        <message>
            <source>Stays at {0} experts: no room for {1}.</source>
            <translation>Bleibt bei {0} Experten: kein Platz für {1}.</translation>
        </message>
        <message>
            <source>Stays at {0} experts: {1} is not a valid size, or too few for a step.</source>
            <translation>Bleibt bei {0} Experten: {1} ist keine gültige Größe oder zu wenig für einen Schritt.</translation>
        </message>
        <message>
            <source>Now {0} experts, was {1}; no room for {2}.</source>
            <translation>Jetzt {0} Experten, vorher {1}; kein Platz für {2}.</translation>
        </message>
        <message>
            <source>Now {0} experts, was {1}.</source>
            <translation>Jetzt {0} Experten, vorher {1}.</translation>
        </message>
        <message>
            <source>hits {0}%, was {1}%</source>
            <translation>trifft {0} %, vorher {1} %</translation>
        </message>
        <message>
            <source>{0} tokens/s, was {1}</source>
            <translation>{0} Token/s, vorher {1}</translation>
        </message>
        <message>
            <source>(predicted: {0})</source>
            <translation>(vorhergesagt: {0})</translation>
        </message>
        <message>
            <source>Measured: {0}.</source>
            <translation>Gemessen: {0}.</translation>
        </message>
    </context>
    <context>
        <name>RooflinePlot</name>
        <message>
            <source>operations per byte →</source>
            <translation>Operationen pro Byte →</translation>
        </message>
        <message>
            <source>Roofline</source>
            <translation>Roofline</translation>
        </message>
        <message>
            <source>{0}: {1}, up to {2}</source>
            <translation>{0}: {1}, bis zu {2}</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>GPU over the link</source>
            <translation>GPU über die Verbindung</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>limited by the link to the card</source>
            <translation>begrenzt durch die Verbindung zur Karte</translation>
        </message>
        <message>
            <source>limited by the card's memory</source>
            <translation>begrenzt durch den Speicher der Karte</translation>
        </message>
        <message>
            <source>limited by GPU compute</source>
            <translation>begrenzt durch die GPU</translation>
        </message>
        <message>
            <source>limited by RAM</source>
            <translation>begrenzt durch den RAM</translation>
        </message>
        <message>
            <source>limited by CPU compute</source>
            <translation>begrenzt durch die CPU</translation>
        </message>
        <message>
            <source>{0}: {1} operations per byte, {2}, {3}</source>
            <translation>{0}: {1} Operationen pro Byte, {2}, {3}</translation>
        </message>
        <message>
            <source>decode</source>
            <translation>Decode</translation>
        </message>
        <message>
            <source>prefill</source>
            <translation>Prefill</translation>
        </message>
        <message>
            <source>batch</source>
            <translation>Stapel</translation>
        </message>
    </context>
    <context>
        <name>RowDetail</name>
        <message>
            <source>Prompt</source>
            <translation>Prompt</translation>
        </message>
        <message>
            <source>Reasoning</source>
            <translation>Überlegungen</translation>
        </message>
        <message>
            <source>Answer</source>
            <translation>Antwort</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>Kopieren</translation>
        </message>
        <message>
            <source>Copy the answer</source>
            <translation>Antwort kopieren</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>Schließen</translation>
        </message>
        <message>
            <source>Row {0}</source>
            <translation>Zeile {0}</translation>
        </message>
        <message>
            <source>{0} tokens</source>
            <translation>{0} Token</translation>
        </message>
        <message>
            <source>Failed: the row {0}.</source>
            <translation>Fehlgeschlagen. Die Zeile: {0}.</translation>
        </message>
        <message>
            <source>The input can no longer be read, or the row was not sent.</source>
            <translation>Die Eingabe kann nicht mehr gelesen werden, oder die Zeile wurde nicht gesendet.</translation>
        </message>
    </context>
    <context>
        <name>RowsCard</name>
        <message>
            <source>Finished rows</source>
            <translation>Fertige Zeilen</translation>
        </message>
        <message>
            <source>Row</source>
            <translation>Zeile</translation>
        </message>
        <message>
            <source>Prompt</source>
            <translation>Prompt</translation>
        </message>
        <message>
            <source>Answer</source>
            <translation>Antwort</translation>
        </message>
        <message>
            <source>End</source>
            <translation>Ende</translation>
        </message>
        <message>
            <source>Tokens</source>
            <translation>Token</translation>
        </message>
        <message>
            <source>Answer again with more tokens</source>
            <translation>Mit mehr Token neu beantworten</translation>
        </message>
        <message>
            <source>Twice as many as each of them had</source>
            <translation>Doppelt so viele, wie jede davon hatte</translation>
        </message>
        <message>
            <source>Latest</source>
            <translation>Neueste</translation>
        </message>
        <message>
            <source>All</source>
            <translation>Alle</translation>
        </message>
        <message>
            <source>Failed</source>
            <translation>Fehlgeschlagen</translation>
        </message>
        <message>
            <source>Cut off</source>
            <translation>Abgeschnitten</translation>
        </message>
        <message>
            <source>No row has failed.</source>
            <translation>Keine Zeile ist fehlgeschlagen.</translation>
        </message>
        <message>
            <source>No row was cut off at its limit of tokens.</source>
            <translation>Keine Zeile wurde an ihrer Token-Grenze abgeschnitten.</translation>
        </message>
        <message>
            <source>Rows appear here as they are answered.</source>
            <translation>Zeilen erscheinen hier, sobald sie beantwortet sind.</translation>
        </message>
        <message>
            <source>No row has been answered yet.</source>
            <translation>Noch ist keine Zeile beantwortet.</translation>
        </message>
    </context>
    <context>
        <name>RunCard</name>
        <message>
            <source>Tuning</source>
            <translation>Optimierung</translation>
        </message>
        <message>
            <source>A model, by a few letters of its name</source>
            <translation>Ein Modell, nach ein paar Buchstaben seines Namens</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modell</translation>
        </message>
        <message>
            <source>A model on this PC, one of the catalogue, or a hub id such as Qwen/Qwen3-30B-A3B</source>
            <translation>Ein Modell auf diesem PC, eines aus dem Katalog oder eine Hub-ID wie Qwen/Qwen3-30B-A3B</translation>
        </message>
        <message>
            <source>Quick, 10 s</source>
            <translation>Schnell, 10 s</translation>
        </message>
        <message>
            <source>Quick: measures for about ten seconds</source>
            <translation>Schnell: misst etwa zehn Sekunden lang</translation>
        </message>
        <message>
            <source>Thorough, 2 min</source>
            <translation>Gründlich, 2 min</translation>
        </message>
        <message>
            <source>Thorough: measures for about two minutes</source>
            <translation>Gründlich: misst etwa zwei Minuten lang</translation>
        </message>
        <message>
            <source>Measure only</source>
            <translation>Nur messen</translation>
        </message>
        <message>
            <source>Tune</source>
            <translation>Optimieren</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Abbrechen</translation>
        </message>
        <message>
            <source>Progress</source>
            <translation>Fortschritt</translation>
        </message>
        <message>
            <source>Save anyway</source>
            <translation>Trotzdem speichern</translation>
        </message>
        <message>
            <source>Saves figures that are too low because other programs were busy</source>
            <translation>Speichert Zahlen, die zu niedrig sind, weil andere Programme beschäftigt waren</translation>
        </message>
        <message>
            <source>Cancelling</source>
            <translation>Wird abgebrochen</translation>
        </message>
        <message>
            <source>Cancelling. The previous model is loaded again.</source>
            <translation>Wird abgebrochen. Das vorherige Modell wird wieder geladen.</translation>
        </message>
        <message>
            <source>Tune again</source>
            <translation>Erneut optimieren</translation>
        </message>
        <message>
            <source>Only models on this PC can be timed; of this one you see a plan.</source>
            <translation>Messen lassen sich nur Modelle auf diesem PC; von diesem sehen Sie einen Plan.</translation>
        </message>
        <message>
            <source>Get it on the Models page…</source>
            <translation>Auf der Seite „Modelle“ holen…</translation>
        </message>
        <message>
            <source>Get another model…</source>
            <translation>Anderes Modell holen…</translation>
        </message>
    </context>
    <context>
        <name>RunFollowing</name>
        <message>
            <source>Waiting for the answer</source>
            <translation>Auf die Antwort wird gewartet</translation>
        </message>
        <message>
            <source>Waiting for the engine</source>
            <translation>Auf die Engine wird gewartet</translation>
        </message>
        <message>
            <source>being timed</source>
            <translation>wird gemessen</translation>
        </message>
        <message>
            <source>being loaded</source>
            <translation>wird geladen</translation>
        </message>
        <message>
            <source>Cancelled: nothing was saved or changed.</source>
            <translation>Abgebrochen: Nichts wurde gespeichert oder geändert.</translation>
        </message>
        <message>
            <source>Not saved: other programs used {0}% of the CPU, so these figures are too low. Close them or let them finish, then tune again.</source>
            <translation>Nicht gespeichert: Andere Programme nutzten {0} % der CPU, daher sind diese Zahlen zu niedrig. Schließen Sie sie oder lassen Sie sie fertig werden, und optimieren Sie dann erneut.</translation>
        </message>
        <message>
            <source>Saved. Loading the model with it.</source>
            <translation>Gespeichert. Das Modell wird damit geladen.</translation>
        </message>
    </context>
    <context>
        <name>RunningJobGuard</name>
        <message>
            <source>A batch job is running.</source>
            <translation>Ein Stapelauftrag läuft.</translation>
        </message>
        <message>
            <source>It stops with the window. No answered row is lost: you can resume it at the next start.</source>
            <translation>Er endet mit dem Fenster. Keine beantwortete Zeile geht verloren: Sie können ihn beim nächsten Start fortsetzen.</translation>
        </message>
        <message>
            <source>Stop it and close</source>
            <translation>Stoppen und schließen</translation>
        </message>
        <message numerus="yes">
            <source>{0} batch jobs are running.</source>
            <translation>
                <numerusform>{0} Stapelauftrag läuft.</numerusform>
                <numerusform>{0} Stapelaufträge laufen.</numerusform>
            </translation>
        </message>
        <message>
            <source>They stop with the window. No answered row is lost: you can resume them at the next start.</source>
            <translation>Sie enden mit dem Fenster. Keine beantwortete Zeile geht verloren: Sie können sie beim nächsten Start fortsetzen.</translation>
        </message>
        <message>
            <source>Stop them and close</source>
            <translation>Stoppen und schließen</translation>
        </message>
        <message>
            <source>Keep the window open</source>
            <translation>Fenster offen lassen</translation>
        </message>
    </context>
    <context>
        <name>SampleCard</name>
        <message>
            <source>Try the first rows</source>
            <translation>Erste Zeilen ausprobieren</translation>
        </message>
        <message>
            <source>See the answers, and how fast they come, before you start the job.</source>
            <translation>Sehen Sie die Antworten und wie schnell sie kommen, bevor Sie den Auftrag starten.</translation>
        </message>
        <message>
            <source>Answering…</source>
            <translation>Wird beantwortet…</translation>
        </message>
        <message>
            <source>Stopped.</source>
            <translation>Gestoppt.</translation>
        </message>
        <message>
            <source>Answer one row</source>
            <translation>Eine Zeile beantworten</translation>
        </message>
        <message>
            <source>Answer two rows</source>
            <translation>Zwei Zeilen beantworten</translation>
        </message>
        <message>
            <source>Stop</source>
            <translation>Stoppen</translation>
        </message>
        <message>
            <source>Answer three rows</source>
            <translation>Drei Zeilen beantworten</translation>
        </message>
    </context>
    <context>
        <name>SamplingPopover</name>
        <message>
            <source>Sampling</source>
            <translation>Sampling</translation>
        </message>
        <message>
            <source>Recommended</source>
            <translation>Empfohlen</translation>
        </message>
        <message>
            <source>Save as…</source>
            <translation>Speichern unter…</translation>
        </message>
        <message>
            <source>Rename…</source>
            <translation>Umbenennen…</translation>
        </message>
        <message>
            <source>Delete</source>
            <translation>Löschen</translation>
        </message>
        <message>
            <source>Name of the preset</source>
            <translation>Name der Voreinstellung</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>Speichern</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Abbrechen</translation>
        </message>
        <message>
            <source>New chats begin with this</source>
            <translation>Neue Chats beginnen hiermit</translation>
        </message>
        <message>
            <source>Use for new chats</source>
            <translation>Für neue Chats verwenden</translation>
        </message>
        <message>
            <source>The model suggests nothing: {0}</source>
            <translation>Das Modell schlägt nichts vor: {0}</translation>
        </message>
        <message>
            <source>As the model's makers suggest: {0}</source>
            <translation>Wie von den Entwicklern des Modells vorgeschlagen: {0}</translation>
        </message>
        <message>
            <source>{0}: {1}.</source>
            <translation>{0}: {1}.</translation>
        </message>
        <message>
            <source>Recommended: {0}.</source>
            <translation>Empfohlen: {0}.</translation>
        </message>
    </context>
    <context>
        <name>SearchCard</name>
        <message>
            <source>Get a model</source>
            <translation>Modell holen</translation>
        </message>
        <message>
            <source>Runs well here</source>
            <translation>Läuft hier gut</translation>
        </message>
        <message>
            <source>Apache or MIT licence</source>
            <translation>Apache- oder MIT-Lizenz</translation>
        </message>
        <message>
            <source>Size</source>
            <translation>Größe</translation>
        </message>
        <message>
            <source>Any size</source>
            <translation>Jede Größe</translation>
        </message>
        <message>
            <source>Up to {0} GB</source>
            <translation>Bis zu {0} GB</translation>
        </message>
        <message>
            <source>Good at</source>
            <translation>Gut in</translation>
        </message>
        <message>
            <source>Good at anything</source>
            <translation>Für alles</translation>
        </message>
        <message>
            <source>Open its page</source>
            <translation>Zur Webseite</translation>
        </message>
        <message>
            <source>Access token…</source>
            <translation>Zugriffstoken…</translation>
        </message>
        <message>
            <source>Looking at this machine…</source>
            <translation>Dieser Rechner wird untersucht…</translation>
        </message>
        <message>
            <source>Nothing in the catalogue matches: press Enter to search the hub, or remove a filter.</source>
            <translation>Nichts im Katalog ist so: Drücken Sie die Eingabetaste, um den Hub zu durchsuchen, oder filtern Sie weniger.</translation>
        </message>
        <message>
            <source>The hub has nothing for “{0}”: try fewer words.</source>
            <translation>Der Hub hat nichts für „{0}“: Versuchen Sie weniger Wörter.</translation>
        </message>
        <message>
            <source>its makers ask you to accept their terms first</source>
            <translation>die Entwickler verlangen zuerst Ihre Zustimmung zu ihren Bedingungen</translation>
        </message>
        <message>
            <source>Licence: {0}</source>
            <translation>Lizenz: {0}</translation>
        </message>
        <message>
            <source>Searching…</source>
            <translation>Suche läuft…</translation>
        </message>
    </context>
    <context>
        <name>SearchLine</name>
        <message>
            <source>Name or words</source>
            <translation>Name oder Wörter</translation>
        </message>
        <message>
            <source>Filters the catalogue; Enter searches the hub, also for ORG/NAME or a link</source>
            <translation>Filtert den Katalog; die Eingabetaste durchsucht den Hub, auch nach ORG/NAME oder einem Link</translation>
        </message>
        <message>
            <source>Search for a model</source>
            <translation>Modell suchen</translation>
        </message>
        <message>
            <source>Search</source>
            <translation>Suchen</translation>
        </message>
    </context>
    <context>
        <name>SecondTimeline</name>
        <message>
            <source>Second timeline</source>
            <translation>Zweite Zeitleiste</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>Schließen</translation>
        </message>
        <message>
            <source>Predicted</source>
            <translation>Vorhergesagt</translation>
        </message>
    </context>
    <context>
        <name>ServedRequests</name>
        <message>
            <source>Time</source>
            <translation>Zeit</translation>
        </message>
        <message>
            <source>Program</source>
            <translation>Programm</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modell</translation>
        </message>
        <message>
            <source>Read</source>
            <translation>Gelesen</translation>
        </message>
        <message>
            <source>Written</source>
            <translation>Erzeugt</translation>
        </message>
        <message>
            <source>Seconds</source>
            <translation>Sekunden</translation>
        </message>
        <message>
            <source>Outcome</source>
            <translation>Ergebnis</translation>
        </message>
        <message>
            <source>answered</source>
            <translation>beantwortet</translation>
        </message>
        <message>
            <source>client left</source>
            <translation>Client ging weg</translation>
        </message>
        <message>
            <source>wrong key</source>
            <translation>falscher Schlüssel</translation>
        </message>
        <message>
            <source>refused ({0})</source>
            <translation>abgelehnt ({0})</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>fehlgeschlagen</translation>
        </message>
        <message>
            <source>{0}, {1}: {2}; {3} tokens read, {4} written, {5} s</source>
            <translation>{0}, {1}: {2}; {3} Token gelesen, {4} geschrieben, {5} s</translation>
        </message>
    </context>
    <context>
        <name>ServerDialog</name>
        <message>
            <source>Save</source>
            <translation>Speichern</translation>
        </message>
        <message>
            <source>Test</source>
            <translation>Testen</translation>
        </message>
        <message>
            <source>Add a server</source>
            <translation>Server hinzufügen</translation>
        </message>
        <message>
            <source>Address</source>
            <translation>Adresse</translation>
        </message>
        <message>
            <source>Name</source>
            <translation>Name</translation>
        </message>
        <message>
            <source>same as its host</source>
            <translation>wie sein Host</translation>
        </message>
        <message>
            <source>none</source>
            <translation>keine</translation>
        </message>
        <message>
            <source>as it is kept</source>
            <translation>wie gespeichert</translation>
        </message>
        <message>
            <source>Key</source>
            <translation>Schlüssel</translation>
        </message>
        <message>
            <source>Certificate</source>
            <translation>Zertifikat</translation>
        </message>
        <message>
            <source>those that the system trusts</source>
            <translation>vom System vertraute</translation>
        </message>
        <message>
            <source>Choose…</source>
            <translation>Wählen…</translation>
        </message>
        <message>
            <source>Choose a certificate's file</source>
            <translation>Zertifikatsdatei wählen</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modell</translation>
        </message>
        <message>
            <source>Requests at once</source>
            <translation>Anfragen zugleich</translation>
        </message>
        <message>
            <source>as measured</source>
            <translation>wie gemessen</translation>
        </message>
        <message>
            <source>Requests a minute</source>
            <translation>Anfragen pro Minute</translation>
        </message>
        <message>
            <source>no limit</source>
            <translation>unbegrenzt</translation>
        </message>
        <message>
            <source>Tokens a minute</source>
            <translation>Token pro Minute</translation>
        </message>
        <message>
            <source>Price of a million tokens read</source>
            <translation>Preis für eine Million gelesene Token</translation>
        </message>
        <message>
            <source>Price of a million tokens written</source>
            <translation>Preis für eine Million geschriebene Token</translation>
        </message>
        <message>
            <source>Currency</source>
            <translation>Währung</translation>
        </message>
        <message>
            <source>Trust its certificate…</source>
            <translation>Zertifikat vertrauen…</translation>
        </message>
        <message>
            <source>Per million tokens read</source>
            <translation>Pro Million gelesene Token</translation>
        </message>
        <message>
            <source>Per million tokens written</source>
            <translation>Pro Million geschriebene Token</translation>
        </message>
        <message>
            <source>price not known</source>
            <translation>Preis unbekannt</translation>
        </message>
        <message>
            <source>Chosen in each chat</source>
            <translation>In jedem Chat gewählt</translation>
        </message>
        <message>
            <source>Less</source>
            <translation>Weniger</translation>
        </message>
        <message>
            <source>More: certificate, model, limits and prices</source>
            <translation>Mehr: Zertifikat, Modell, Grenzen und Preise</translation>
        </message>
        <message>
            <source>It is tested before it is kept: that asks a model for a few tokens. The key is kept in the system's keyring, or for this run only where there is none.</source>
            <translation>Der Server wird getestet, bevor er gespeichert wird: Dabei schreibt ein Modell ein paar Token. Der Schlüssel kommt in den Schlüsselbund des Systems oder, wo es keinen gibt, gilt er nur bis zum Beenden.</translation>
        </message>
        <message>
            <source>Asking {0}…</source>
            <translation>{0} wird gefragt…</translation>
        </message>
        <message>
            <source>It answers in {0} ms.</source>
            <translation>Er antwortet in {0} ms.</translation>
        </message>
        <message>
            <source>It answers in {0} ms; the first token came after {1} s.</source>
            <translation>Er antwortet in {0} ms; das erste Token kam nach {1} s.</translation>
        </message>
        <message>
            <source>Choose a model and test again to see what it can do.</source>
            <translation>Wählen Sie ein Modell und testen Sie erneut, um zu sehen, was es kann.</translation>
        </message>
        <message>
            <source>Its fingerprint (SHA-256) is
{0}
Compare it with what that server shows: “switchyard serve --https” prints it. Only this certificate is trusted for this server then.</source>
            <translation>Sein Fingerabdruck (SHA-256) ist
{0}
Vergleichen Sie ihn mit dem, den der Server anzeigt: „switchyard serve --https“ gibt ihn aus. Für diesen Server wird dann nur diesem Zertifikat vertraut.</translation>
        </message>
        <message>
            <source>Trust the certificate of {0}?</source>
            <translation>Dem Zertifikat von {0} vertrauen?</translation>
        </message>
        <message>
            <source>Trust it</source>
            <translation>Vertrauen</translation>
        </message>
        <message>
            <source>Certificates (*.pem *.crt *.cer)</source>
            <translation>Zertifikate (*.pem *.crt *.cer)</translation>
        </message>
        <message>
            <source>The server's certificate</source>
            <translation>Das Zertifikat des Servers</translation>
        </message>
    </context>
    <context>
        <name>Servers</name>
        <message>
            <source>Not tested yet.</source>
            <translation>Noch nicht getestet.</translation>
        </message>
        <message>
            <source>A server with OpenAI's interface</source>
            <translation>Ein Server mit der Schnittstelle von OpenAI</translation>
        </message>
        <message>
            <source>no model</source>
            <translation>kein Modell</translation>
        </message>
        <message>
            <source>{0} and {1} more</source>
            <translation>{0} und {1} weitere</translation>
        </message>
        <message>
            <source>{0} or {1}</source>
            <translation>{0} oder {1}</translation>
        </message>
        <message>
            <source>It cannot {0}.</source>
            <translation>Nicht möglich: {0}.</translation>
        </message>
        <message>
            <source>Models that read text only, no pictures: {0}.</source>
            <translation>Modelle, die nur Text lesen, keine Bilder: {0}.</translation>
        </message>
        <message>
            <source>It reads text only, no pictures.</source>
            <translation>Liest nur Text, keine Bilder.</translation>
        </message>
        <message>
            <source>send answers as they are written</source>
            <translation>Antworten senden, während sie geschrieben werden</translation>
        </message>
        <message>
            <source>count tokens</source>
            <translation>Token zählen</translation>
        </message>
        <message>
            <source>call tools</source>
            <translation>Werkzeuge aufrufen</translation>
        </message>
        <message>
            <source>keep to a schema</source>
            <translation>ein Schema einhalten</translation>
        </message>
        <message>
            <source>take top-k, min-p or a repetition penalty</source>
            <translation>Top-k, Min-p oder eine Wiederholungsstrafe annehmen</translation>
        </message>
        <message>
            <source>{0} at once</source>
            <translation>{0} zugleich</translation>
        </message>
        <message>
            <source>{0} requests a minute</source>
            <translation>{0} Anfragen pro Minute</translation>
        </message>
        <message>
            <source>{0} tokens a minute</source>
            <translation>{0} Token pro Minute</translation>
        </message>
        <message>
            <source>a million tokens read: {0}{1}</source>
            <translation>eine Million gelesene Token: {0}{1}</translation>
        </message>
        <message>
            <source>written: {0}{1}</source>
            <translation>geschriebene: {0}{1}</translation>
        </message>
    </context>
    <context>
        <name>ServersCard</name>
        <message>
            <source>Remote servers</source>
            <translation>Andere Server</translation>
        </message>
        <message>
            <source>Add…</source>
            <translation>Hinzufügen…</translation>
        </message>
        <message>
            <source>Add a server</source>
            <translation>Server hinzufügen</translation>
        </message>
        <message>
            <source>vLLM, SGLang, llama.cpp, Ollama, another Switchyard. Text goes to one only in chats and jobs where you choose it.</source>
            <translation>vLLM, SGLang, llama.cpp, Ollama, ein anderes Switchyard. Text geht nur in solchen Chats und Aufträgen an einen Server, in denen Sie ihn wählen.</translation>
        </message>
        <message>
            <source>Look on this network</source>
            <translation>In diesem Netzwerk suchen</translation>
        </message>
        <message>
            <source>Models that run elsewhere</source>
            <translation>Modelle, die anderswo laufen</translation>
        </message>
        <message>
            <source>Looking…</source>
            <translation>Suche läuft…</translation>
        </message>
        <message>
            <source>No Switchyard answered. One does if it was started with “switchyard serve --host 0.0.0.0 --https --announce NAME” in this network.</source>
            <translation>Kein Switchyard hat geantwortet. Eines antwortet, wenn es in diesem Netzwerk mit „switchyard serve --host 0.0.0.0 --https --announce NAME“ gestartet wurde.</translation>
        </message>
        <message>
            <source>All that answered are in the list.</source>
            <translation>Alle, die geantwortet haben, stehen in der Liste.</translation>
        </message>
        <message>
            <source>Add {0}</source>
            <translation>{0} hinzufügen</translation>
        </message>
        <message>
            <source>Found on this network · {0}</source>
            <translation>In diesem Netzwerk gefunden · {0}</translation>
        </message>
        <message>
            <source>Edit…</source>
            <translation>Bearbeiten…</translation>
        </message>
        <message>
            <source>Edit {0}</source>
            <translation>{0} bearbeiten</translation>
        </message>
        <message>
            <source>Remove</source>
            <translation>Entfernen</translation>
        </message>
        <message>
            <source>Remove {0}</source>
            <translation>{0} entfernen</translation>
        </message>
        <message>
            <source>Its key is removed, too. Chats that were held with it stay; nothing else answers in them by itself.</source>
            <translation>Auch der Schlüssel wird entfernt. Chats, die damit geführt wurden, bleiben; von selbst antwortet in ihnen nichts anderes.</translation>
        </message>
        <message>
            <source>Remove {0}?</source>
            <translation>{0} entfernen?</translation>
        </message>
    </context>
    <context>
        <name>SessionsButton</name>
        <message>
            <source>Sessions</source>
            <translation>Sitzungen</translation>
        </message>
        <message>
            <source>Reading…</source>
            <translation>Wird gelesen…</translation>
        </message>
        <message>
            <source>None yet: ask something in Chat</source>
            <translation>Noch keine: Fragen Sie etwas im Chat</translation>
        </message>
        <message>
            <source>Open</source>
            <translation>Öffnen</translation>
        </message>
        <message>
            <source>Compare with</source>
            <translation>Vergleichen mit</translation>
        </message>
        <message>
            <source>The session could not be read.</source>
            <translation>Die Sitzung konnte nicht gelesen werden.</translation>
        </message>
    </context>
    <context>
        <name>Setting</name>
        <message>
            <source>Automatic</source>
            <translation>Automatisch</translation>
        </message>
        <message>
            <source>Speed and memory</source>
            <translation>Geschwindigkeit und Speicher</translation>
        </message>
        <message>
            <source>Runs on</source>
            <translation>Läuft auf</translation>
        </message>
        <message>
            <source>Automatic takes the graphics card, if there is one, and the processor for what does not fit.</source>
            <translation>„Automatisch“ nutzt die Grafikkarte, falls vorhanden, und den Prozessor für das, was nicht hineinpasst.</translation>
        </message>
        <message>
            <source>Processor only</source>
            <translation>Nur Prozessor</translation>
        </message>
        <message>
            <source>Precision</source>
            <translation>Genauigkeit</translation>
        </message>
        <message>
            <source>Automatic keeps the best that fits. Lower precision takes less memory and is faster.</source>
            <translation>„Automatisch“ behält die beste, die passt. Gröbere Gewichte brauchen weniger Speicher und sind schneller.</translation>
        </message>
        <message>
            <source>Graphics memory to use</source>
            <translation>Nutzbarer Grafikspeicher</translation>
        </message>
        <message>
            <source>For experts that are used often; the rest is left to other programs.</source>
            <translation>Für häufig genutzte Experten; der Rest bleibt anderen Programmen.</translation>
        </message>
        <message>
            <source>RAM to use</source>
            <translation>Nutzbarer RAM</translation>
        </message>
        <message>
            <source>For the model; what does not fit is read from the disk again and again.</source>
            <translation>Für das Modell; was nicht hineinpasst, wird immer wieder vom Datenträger gelesen.</translation>
        </message>
        <message>
            <source>CPU threads</source>
            <translation>CPU-Threads</translation>
        </message>
        <message>
            <source>Automatic uses one per core. Fewer leave room for other programs.</source>
            <translation>„Automatisch“ nutzt einen pro Kern. Weniger lassen Platz für andere Programme.</translation>
        </message>
        <message>
            <source>For experts</source>
            <translation>Für Fachleute</translation>
        </message>
        <message>
            <source>Experts on each card</source>
            <translation>Experten je Grafikkarte</translation>
        </message>
        <message>
            <source>Automatic keeps as many as fit; 0 keeps none.</source>
            <translation>Automatisch behält so viele, wie passen; 0 behält keine.</translation>
        </message>
        <message>
            <source>Slots for each layer</source>
            <translation>Plätze je Schicht</translation>
        </message>
        <message>
            <source>Automatic lets all layers share the slots; a number gives each layer that many of its own.</source>
            <translation>Automatisch teilen sich alle Schichten die Plätze; eine Zahl gibt jeder Schicht so viele eigene.</translation>
        </message>
        <message>
            <source>Which experts stay on the card</source>
            <translation>Welche Experten auf der Karte bleiben</translation>
        </message>
        <message>
            <source>Automatic watches which rule would have kept the right ones, and takes that one.</source>
            <translation>„Automatisch“ beobachtet, welche Regel die richtigen behalten hätte, und nimmt diese.</translation>
        </message>
        <message>
            <source>Recently used ones</source>
            <translation>Zuletzt benutzte</translation>
        </message>
        <message>
            <source>Newest ones</source>
            <translation>Neueste</translation>
        </message>
        <message>
            <source>Often used ones</source>
            <translation>Oft benutzte</translation>
        </message>
        <message>
            <source>Recently and often used ones</source>
            <translation>Zuletzt und oft benutzte</translation>
        </message>
        <message>
            <source>Random ones</source>
            <translation>Zufällige</translation>
        </message>
        <message>
            <source>Popular ones, fixed</source>
            <translation>Beliebte, fest</translation>
        </message>
        <message>
            <source>Experts that are not on the card</source>
            <translation>Experten, die nicht auf der Karte sind</translation>
        </message>
        <message>
            <source>All but the first are for comparisons.</source>
            <translation>Alle außer dem Ersten dienen Vergleichen.</translation>
        </message>
        <message>
            <source>Whichever is faster</source>
            <translation>Was schneller ist</translation>
        </message>
        <message>
            <source>Processor computes</source>
            <translation>Prozessor rechnet</translation>
        </message>
        <message>
            <source>Card fetches</source>
            <translation>Karte holt sie</translation>
        </message>
        <message>
            <source>Nothing is kept</source>
            <translation>Nichts wird behalten</translation>
        </message>
        <message>
            <source>Whole layers</source>
            <translation>Ganze Schichten</translation>
        </message>
        <message>
            <source>Guessing which experts come next</source>
            <translation>Erraten, welche Experten folgen</translation>
        </message>
        <message>
            <source>Guessed experts are copied to the card in advance. Automatic uses what pays off, if anything does.</source>
            <translation>Erratene Experten werden im Voraus auf die Karte kopiert. Automatisch nimmt, was sich lohnt, wenn sich etwas lohnt.</translation>
        </message>
        <message>
            <source>Off</source>
            <translation>Aus</translation>
        </message>
        <message>
            <source>Those of the last token</source>
            <translation>Die des letzten Tokens</translation>
        </message>
        <message>
            <source>The next layer’s router</source>
            <translation>Router der nächsten Schicht</translation>
        </message>
        <message>
            <source>What usually follows</source>
            <translation>Was meist folgt</translation>
        </message>
        <message>
            <source>A trained predictor</source>
            <translation>Ein trainierter Vorhersager</translation>
        </message>
        <message>
            <source>Replay steps on the card</source>
            <translation>Schritte auf der Karte wiedergeben</translation>
        </message>
        <message>
            <source>The card replays a recorded step (a CUDA graph) instead of being told each operation.</source>
            <translation>Die Karte gibt einen aufgezeichneten Schritt wieder (CUDA-Graph), statt jeden Befehl einzeln zu erhalten.</translation>
        </message>
        <message>
            <source>On</source>
            <translation>Ein</translation>
        </message>
        <message>
            <source>Several graphics cards</source>
            <translation>Mehrere Grafikkarten</translation>
        </message>
        <message>
            <source>By layers, each card has a run of layers; by experts, each has a part of every layer’s experts.</source>
            <translation>Nach Schichten hat jede Karte einen Abschnitt der Schichten; nach Experten hat jede einen Teil der Experten jeder Schicht.</translation>
        </message>
        <message>
            <source>By layers</source>
            <translation>Nach Schichten</translation>
        </message>
        <message>
            <source>By experts</source>
            <translation>Nach Experten</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modell</translation>
        </message>
        <message>
            <source>Speculative decoding</source>
            <translation>Spekulatives Decoding</translation>
        </message>
        <message>
            <source>Answers that quote, such as edits of a text, come faster: likely next words are tried together, only as long as that pays. Answers stay the same.</source>
            <translation>Antworten, die zitieren, etwa bearbeitete Texte, kommen schneller: Wahrscheinliche nächste Wörter werden gemeinsam geprüft, nur solange es sich lohnt. Die Antworten bleiben gleich.</translation>
        </message>
        <message>
            <source>Where it pays</source>
            <translation>Wo es sich lohnt</translation>
        </message>
        <message>
            <source>With the model’s own layer</source>
            <translation>Mit der Schicht des Modells</translation>
        </message>
        <message>
            <source>Keys and values</source>
            <translation>Keys und Values</translation>
        </message>
        <message>
            <source>What the model keeps of a conversation. int8 takes about half the memory; answers may differ slightly (with the starter, perplexity rose by 0.08%).</source>
            <translation>Was das Modell von einem Gespräch behält. int8 braucht etwa halb so viel Speicher; Antworten können leicht abweichen (beim Startmodell stieg die Perplexität um 0,08 %).</translation>
        </message>
        <message>
            <source>As in the model</source>
            <translation>Wie im Modell</translation>
        </message>
        <message>
            <source>Appearance</source>
            <translation>Darstellung</translation>
        </message>
        <message>
            <source>Theme</source>
            <translation>Farbschema</translation>
        </message>
        <message>
            <source>System follows the desktop's setting.</source>
            <translation>„System“ folgt der Einstellung des Desktops.</translation>
        </message>
        <message>
            <source>System</source>
            <translation>System</translation>
        </message>
        <message>
            <source>Light</source>
            <translation>Hell</translation>
        </message>
        <message>
            <source>Dark</source>
            <translation>Dunkel</translation>
        </message>
        <message>
            <source>Language</source>
            <translation>Sprache</translation>
        </message>
        <message>
            <source>System is the language of this PC, or English.</source>
            <translation>„System“ ist die Sprache dieses PCs, sonst Englisch.</translation>
        </message>
        <message>
            <source>Text size</source>
            <translation>Textgröße</translation>
        </message>
        <message>
            <source>Of everything in this window.</source>
            <translation>Von allem in diesem Fenster.</translation>
        </message>
        <message>
            <source>Default model</source>
            <translation>Standardmodell</translation>
        </message>
        <message>
            <source>Loaded when Switchyard starts.</source>
            <translation>Wird beim Start von Switchyard geladen.</translation>
        </message>
        <message>
            <source>Free the memory after</source>
            <translation>Speicher freigeben nach</translation>
        </message>
        <message>
            <source>If the model is not used for this long; the next question loads it again.</source>
            <translation>Wenn niemand das Modell so lange nutzt; die nächste Frage lädt es wieder.</translation>
        </message>
        <message>
            <source>Never</source>
            <translation>Nie</translation>
        </message>
        <message>
            <source>Batch jobs at once</source>
            <translation>Stapelaufträge zugleich</translation>
        </message>
        <message>
            <source>They share each pass through the model; others wait for their turn.</source>
            <translation>Sie teilen sich jeden Durchlauf durch das Modell; weitere warten, bis sie an der Reihe sind.</translation>
        </message>
        <message>
            <source>Quick question</source>
            <translation>Schnelle Frage</translation>
        </message>
        <message>
            <source>Icon in the tray</source>
            <translation>Symbol im Infobereich</translation>
        </message>
        <message>
            <source>Click it to ask a question from anywhere, in a small window above the others.</source>
            <translation>Ein Klick darauf stellt von überall eine Frage, in einem kleinen Fenster über den anderen.</translation>
        </message>
        <message>
            <source>Keep running when the window is closed</source>
            <translation>Weiterlaufen, wenn das Fenster geschlossen wird</translation>
        </message>
        <message>
            <source>The model stays in memory, and answers and batch jobs go on. Quit from the icon’s menu or with Ctrl+Q.</source>
            <translation>Das Modell bleibt im Speicher; Antworten und Stapelaufträge gehen weiter. Beenden Sie das Programm im Menü des Symbols oder mit Strg+Q.</translation>
        </message>
        <message>
            <source>API server</source>
            <translation>API-Server</translation>
        </message>
        <message>
            <source>Let apps use the models of this PC</source>
            <translation>Apps die Modelle dieses PCs nutzen lassen</translation>
        </message>
        <message>
            <source>Who may use it</source>
            <translation>Wer ihn nutzen darf</translation>
        </message>
        <message>
            <source>This PC</source>
            <translation>Dieser PC</translation>
        </message>
        <message>
            <source>This PC, with key</source>
            <translation>Dieser PC, mit Schlüssel</translation>
        </message>
        <message>
            <source>Network, with key</source>
            <translation>Netzwerk, mit Schlüssel</translation>
        </message>
        <message>
            <source>Port</source>
            <translation>Port</translation>
        </message>
        <message>
            <source>Choose another if a program on this PC already uses it.</source>
            <translation>Ein anderer, falls ein Programm hier ihn schon verwendet.</translation>
        </message>
        <message>
            <source>Free them after</source>
            <translation>Freigeben nach</translation>
        </message>
        <message>
            <source>A model that a program asked for is freed once no program has used it for this long.</source>
            <translation>Ein von einem Programm angefordertes Modell wird freigegeben, wenn es so lange kein Programm genutzt hat.</translation>
        </message>
        <message>
            <source>Keep loaded</source>
            <translation>Geladen lassen</translation>
        </message>
        <message>
            <source>My model makes room for them</source>
            <translation>Mein Modell macht ihnen Platz</translation>
        </message>
        <message>
            <source>Where both do not fit, yours is put aside, and loaded again for your next question.</source>
            <translation>Wo nicht beide hineinpassen, wird Ihres beiseitegelegt und für Ihre nächste Frage wieder geladen.</translation>
        </message>
        <message>
            <source>Monitor</source>
            <translation>Monitor</translation>
        </message>
        <message>
            <source>Record sessions</source>
            <translation>Sitzungen aufzeichnen</translation>
        </message>
        <message>
            <source>Timings and counters that the Monitor can open later: no prompts, no answers. They stay on this machine and take up to 512 MB; the oldest are deleted.</source>
            <translation>Zeiten und Zähler, die der Monitor später öffnen kann: keine Prompts, keine Antworten. Sie bleiben auf diesem Rechner und belegen bis zu 512 MB; die ältesten werden gelöscht.</translation>
        </message>
        <message>
            <source>Updates</source>
            <translation>Aktualisierungen</translation>
        </message>
        <message>
            <source>Check for updates</source>
            <translation>Nach Aktualisierungen suchen</translation>
        </message>
        <message>
            <source>Once a day, at the start. Nothing about you is sent, and nothing is downloaded without asking.</source>
            <translation>Einmal täglich, beim Start. Über Sie wird nichts gesendet, und nichts wird ungefragt heruntergeladen.</translation>
        </message>
        <message>
            <source>Temperature</source>
            <translation>Temperatur</translation>
        </message>
        <message>
            <source>0 always takes the likeliest token; higher is more varied</source>
            <translation>0 nimmt immer das wahrscheinlichste Token; höher ist abwechslungsreicher</translation>
        </message>
        <message>
            <source>Top-k</source>
            <translation>Top-k</translation>
        </message>
        <message>
            <source>Sample from the k likeliest tokens</source>
            <translation>Aus den k wahrscheinlichsten Token wählen</translation>
        </message>
        <message>
            <source>off</source>
            <translation>aus</translation>
        </message>
        <message>
            <source>Top-p</source>
            <translation>Top-p</translation>
        </message>
        <message>
            <source>Sample from the likeliest tokens with a total probability of p; 1 is off</source>
            <translation>Aus den wahrscheinlichsten Token mit der Gesamtwahrscheinlichkeit p wählen; 1 ist aus</translation>
        </message>
        <message>
            <source>Min-p</source>
            <translation>Min-p</translation>
        </message>
        <message>
            <source>Drop tokens below this share of the likeliest one's probability; 0 is off</source>
            <translation>Token unter diesem Anteil der Wahrscheinlichkeit des wahrscheinlichsten weglassen; 0 ist aus</translation>
        </message>
        <message>
            <source>Repetition penalty</source>
            <translation>Wiederholungsstrafe</translation>
        </message>
        <message>
            <source>Above 1, tokens already used become less likely; 1 is off</source>
            <translation>Über 1 werden schon benutzte Token unwahrscheinlicher; 1 ist aus</translation>
        </message>
        <message>
            <source>Seed</source>
            <translation>Startwert</translation>
        </message>
        <message>
            <source>The same seed gives the same answer to the same chat</source>
            <translation>Derselbe Startwert ergibt im selben Chat dieselbe Antwort</translation>
        </message>
        <message>
            <source>random</source>
            <translation>zufällig</translation>
        </message>
        <message>
            <source>Stop strings</source>
            <translation>Stopptexte</translation>
        </message>
        <message>
            <source>An answer ends before the first of these</source>
            <translation>Eine Antwort endet vor dem ersten davon</translation>
        </message>
        <message>
            <source>Max tokens</source>
            <translation>Max. Token</translation>
        </message>
        <message>
            <source>Answers stop at this length</source>
            <translation>Antworten enden bei dieser Länge</translation>
        </message>
        <message>
            <source>Beams</source>
            <translation>Beams</translation>
        </message>
        <message>
            <source>Beam search if above 1; ignores temperature, top-k, top-p and min-p</source>
            <translation>Beam-Suche, wenn größer als 1; Temperatur, Top-k, Top-p und Min-p gelten dann nicht</translation>
        </message>
        <message>
            <source>Loop guard</source>
            <translation>Schleifenschutz</translation>
        </message>
        <message>
            <source>Ends loops (DRY): what would repeat earlier text becomes less likely; 0 is off, 0.8 is usual</source>
            <translation>Beendet Schleifen (DRY): Was früheren Text wiederholen würde, wird unwahrscheinlicher; 0 ist aus, 0,8 ist üblich</translation>
        </message>
        <message>
            <source>Guard: growth</source>
            <translation>Schutz: Zunahme</translation>
        </message>
        <message>
            <source>How much stronger the loop guard gets with each repeated token</source>
            <translation>Um wie viel der Schleifenschutz mit jedem wiederholten Token stärker wird</translation>
        </message>
        <message>
            <source>Guard: length</source>
            <translation>Schutz: Länge</translation>
        </message>
        <message>
            <source>Repetitions shorter than this many tokens are free</source>
            <translation>Wiederholungen unter dieser Zahl von Token sind frei</translation>
        </message>
        <message>
            <source>Guard: range</source>
            <translation>Schutz: Bereich</translation>
        </message>
        <message>
            <source>How many of the last tokens, earlier messages included, are searched; by default only the answer</source>
            <translation>Wie viele der letzten Token durchsucht werden, frühere Nachrichten eingeschlossen; normalerweise nur die Antwort</translation>
        </message>
        <message>
            <source>answer</source>
            <translation>Antwort</translation>
        </message>
        <message>
            <source>Guard: ends at</source>
            <translation>Schutz: endet bei</translation>
        </message>
        <message>
            <source>Repetitions are not followed across these texts; \n is a line break</source>
            <translation>Wiederholungen werden nicht über diese Texte hinweg verfolgt; \n ist ein Zeilenumbruch</translation>
        </message>
        <message>
            <source>Presence penalty</source>
            <translation>Präsenzstrafe</translation>
        </message>
        <message>
            <source>Makes every token that the answer has already less likely, once; 0 is off</source>
            <translation>Macht jedes Token, das die Antwort schon enthält, einmal unwahrscheinlicher; 0 ist aus</translation>
        </message>
        <message>
            <source>Frequency penalty</source>
            <translation>Häufigkeitsstrafe</translation>
        </message>
        <message>
            <source>Makes tokens less likely with each time that the answer has them already; 0 is off</source>
            <translation>Macht Token mit jedem Mal unwahrscheinlicher, das die Antwort sie schon enthält; 0 ist aus</translation>
        </message>
        <message>
            <source>Thinking</source>
            <translation>Nachdenken</translation>
        </message>
        <message>
            <source>Whether the model reasons before it answers; its thoughts count as tokens of the answer</source>
            <translation>Ob das Modell nachdenkt, bevor es antwortet; seine Gedanken zählen als Token der Antwort</translation>
        </message>
        <message>
            <source>As the model does</source>
            <translation>Wie vom Modell vorgesehen</translation>
        </message>
        <message>
            <source>Low</source>
            <translation>Niedrig</translation>
        </message>
        <message>
            <source>Medium</source>
            <translation>Mittel</translation>
        </message>
        <message>
            <source>High</source>
            <translation>Hoch</translation>
        </message>
        <message>
            <source>Keep chats' computed context on disk</source>
            <translation>Berechneten Kontext von Chats auf dem Datenträger behalten</translation>
        </message>
        <message>
            <source>A chat then goes on at once after another one or a restart: what the model has read need not be read again. It is made of your prompts and answers, encrypted, and removed with its chat. The key is in the system's keyring; where there is none it is a file beside the settings, and whoever can read your files can decrypt it. Turning this off removes what is kept.</source>
            <translation>Ein Chat geht dann nach einem anderen oder nach einem Neustart sofort weiter: Was das Modell gelesen hat, muss es nicht noch einmal lesen. Die Daten entstehen aus Ihren Prompts und Antworten, sind verschlüsselt und werden mit ihrem Chat gelöscht. Der Schlüssel liegt im Schlüsselbund des Systems; wo es keinen gibt, in einer Datei neben den Einstellungen, und wer Ihre Dateien lesen kann, kann sie entschlüsseln. Beim Ausschalten wird das Behaltene gelöscht.</translation>
        </message>
        <message>
            <source>At most</source>
            <translation>Höchstens</translation>
        </message>
        <message>
            <source>What was of no use for longest is removed first. 2 GB of the disk always stay free.</source>
            <translation>Was am längsten nichts genützt hat, wird zuerst gelöscht. 2 GB des Datenträgers bleiben immer frei.</translation>
        </message>
    </context>
    <context>
        <name>Settings</name>
        <message>
            <source>The settings could not be saved to {0} ({1}); free some space or check its permissions.</source>
            <translation>Die Einstellungen konnten nicht in {0} gespeichert werden ({1}); geben Sie Platz frei oder prüfen Sie die Berechtigungen.</translation>
        </message>
        <message>
            <source>The settings in {0} could not be read ({1}), so the defaults are used.</source>
            <translation>Die Einstellungen in {0} konnten nicht gelesen werden ({1}), daher gelten die Standardwerte.</translation>
        </message>
        <message>
            <source>Some settings in {0} make no sense ({1}): the usual ones are used instead of these.</source>
            <translation>Einige Einstellungen in {0} ergeben keinen Sinn ({1}): Statt dieser gelten die üblichen.</translation>
        </message>
        <message>
            <source>The settings file was damaged; it is kept as {0}, and the defaults are used.</source>
            <translation>Die Einstellungsdatei war beschädigt; sie bleibt als {0} erhalten, und die Standardwerte gelten.</translation>
        </message>
    </context>
    <context>
        <name>SettingsCard</name>
        <message>
            <source>Hide</source>
            <translation>Ausblenden</translation>
        </message>
        <message>
            <source>Show</source>
            <translation>Anzeigen</translation>
        </message>
        <message>
            <source>Needs a reload.</source>
            <translation>Erfordert Neuladen.</translation>
        </message>
        <message>
            <source>Needs a restart.</source>
            <translation>Erfordert einen Neustart.</translation>
        </message>
        <message>
            <source>{0} px</source>
            <translation>{0} px</translation>
        </message>
        <message>
            <source>all that is free</source>
            <translation>alles, was frei ist</translation>
        </message>
        <message>
            <source>at most {0}</source>
            <translation>höchstens {0}</translation>
        </message>
        <message>
            <source>none; separate with commas</source>
            <translation>keine; mit Kommas trennen</translation>
        </message>
    </context>
    <context>
        <name>SettingsPage</name>
        <message>
            <source>This desktop has no tray for icons.</source>
            <translation>Dieser Desktop hat keinen Infobereich für Symbole.</translation>
        </message>
        <message>
            <source>No setting has these words.</source>
            <translation>Keine Einstellung enthält diese Wörter.</translation>
        </message>
        <message>
            <source>Find a setting</source>
            <translation>Einstellung suchen</translation>
        </message>
        <message>
            <source>Settings</source>
            <translation>Einstellungen</translation>
        </message>
    </context>
    <context>
        <name>SharedSettingsCard</name>
        <message>
            <source>Template</source>
            <translation>Vorlage</translation>
        </message>
        <message>
            <source>Input</source>
            <translation>Eingabe</translation>
        </message>
        <message>
            <source>Result</source>
            <translation>Ergebnis</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modell</translation>
        </message>
        <message>
            <source>Answered by</source>
            <translation>Beantwortet von</translation>
        </message>
        <message>
            <source>Max tokens</source>
            <translation>Max. Token</translation>
        </message>
        <message>
            <source>Temperature</source>
            <translation>Temperatur</translation>
        </message>
        <message>
            <source>Answer must be</source>
            <translation>Form der Antwort</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>System-Prompt</translation>
        </message>
        <message>
            <source>Each row's own messages</source>
            <translation>Die eigenen Nachrichten jeder Zeile</translation>
        </message>
        <message>
            <source>JSON with a schema</source>
            <translation>JSON nach Schema</translation>
        </message>
        <message>
            <source>one of {0}</source>
            <translation>eines von {0}</translation>
        </message>
        <message>
            <source>text</source>
            <translation>Text</translation>
        </message>
        <message>
            <source>0 (the likeliest token)</source>
            <translation>0 (das wahrscheinlichste Token)</translation>
        </message>
        <message>
            <source>none</source>
            <translation>keine</translation>
        </message>
        <message>
            <source>the servers' own</source>
            <translation>wie vom Server vorgesehen</translation>
        </message>
        <message>
            <source>the loaded one</source>
            <translation>das geladene</translation>
        </message>
        <message>
            <source>this PC</source>
            <translation>diesem PC</translation>
        </message>
        <message>
            <source>the Ray cluster at {0}</source>
            <translation>den Ray-Cluster unter {0}</translation>
        </message>
    </context>
    <context>
        <name>ShortcutsDialog</name>
        <message>
            <source>Keyboard shortcuts</source>
            <translation>Tastenkürzel</translation>
        </message>
    </context>
    <context>
        <name>SideBySide</name>
        <message>
            <source>Side by side</source>
            <translation>Nebeneinander</translation>
        </message>
        <message>
            <source>Question for both</source>
            <translation>Frage an beide</translation>
        </message>
        <message>
            <source>One question for both</source>
            <translation>Eine Frage an beide</translation>
        </message>
        <message>
            <source>Ask both</source>
            <translation>Beide fragen</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>Schließen</translation>
        </message>
        <message>
            <source>The model here</source>
            <translation>Das Modell hier</translation>
        </message>
        <message>
            <source>its only model</source>
            <translation>sein einziges Modell</translation>
        </message>
        <message>
            <source>This chat is being answered: wait for the end, or stop it.</source>
            <translation>Dieser Chat wird gerade beantwortet: Warten Sie auf das Ende oder stoppen Sie ihn.</translation>
        </message>
        <message>
            <source>Stop</source>
            <translation>Stoppen</translation>
        </message>
        <message>
            <source>Choose another model or other settings for one of them.</source>
            <translation>Wählen Sie für eines von beiden ein anderes Modell oder andere Einstellungen.</translation>
        </message>
        <message>
            <source>One model is open at a time on this PC: the second is loaded when the first has answered.</source>
            <translation>Auf diesem PC ist immer nur ein Modell geöffnet: Das zweite wird geladen, wenn das erste geantwortet hat.</translation>
        </message>
        <message>
            <source>Both answers are kept in the chat, as versions of one turn.</source>
            <translation>Beide Antworten bleiben im Chat, als Versionen einer Nachricht.</translation>
        </message>
    </context>
    <context>
        <name>Sidebar</name>
        <message>
            <source>Navigation</source>
            <translation>Navigation</translation>
        </message>
        <message>
            <source>Go to {0}</source>
            <translation>Zu „{0}“ gehen</translation>
        </message>
    </context>
    <context>
        <name>SizeChooser</name>
        <message>
            <source>Experts kept in this tier</source>
            <translation>In dieser Stufe behaltene Experten</translation>
        </message>
        <message>
            <source>Experts kept</source>
            <translation>Behaltene Experten</translation>
        </message>
        <message>
            <source>Resize</source>
            <translation>Größe ändern</translation>
        </message>
        <message>
            <source>Lasts until the model is reloaded; Tune sets a permanent size.</source>
            <translation>Gilt, bis das Modell neu geladen wird; „Optimieren“ legt eine dauerhafte Größe fest.</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>Rückgängig</translation>
        </message>
    </context>
    <context>
        <name>SourceRow</name>
        <message>
            <source>Sources</source>
            <translation>Quellen</translation>
        </message>
        <message>
            <source> p. {0}</source>
            <translation> S. {0}</translation>
        </message>
        <message>
            <source>Source {0}: {1}</source>
            <translation>Quelle {0}: {1}</translation>
        </message>
    </context>
    <context>
        <name>StarterDownload</name>
        <message>
            <source>The download could not be started: reinstall Switchyard.</source>
            <translation>Der Download konnte nicht gestartet werden: Installieren Sie Switchyard neu.</translation>
        </message>
        <message>
            <source>The starter model could not be built; try again.</source>
            <translation>Das Startmodell konnte nicht erstellt werden; versuchen Sie es erneut.</translation>
        </message>
    </context>
    <context>
        <name>StarterOffer</name>
        <message>
            <source>Download of the starter model</source>
            <translation>Download des Startmodells</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Abbrechen</translation>
        </message>
        <message>
            <source>Try again</source>
            <translation>Erneut versuchen</translation>
        </message>
        <message>
            <source>Get the starter (93 MB)</source>
            <translation>Startmodell holen (93 MB)</translation>
        </message>
        <message>
            <source>Getting the starter model…</source>
            <translation>Das Startmodell wird geholt…</translation>
        </message>
        <message>
            <source>Stopping…</source>
            <translation>Wird gestoppt…</translation>
        </message>
        <message>
            <source>Getting the starter model, {0}% done…</source>
            <translation>Das Startmodell wird geholt, {0} % fertig…</translation>
        </message>
    </context>
    <context>
        <name>StepBar</name>
        <message>
            <source>Steps</source>
            <translation>Schritte</translation>
        </message>
        <message>
            <source>Your machine</source>
            <translation>Ihr Rechner</translation>
        </message>
        <message>
            <source>Measure</source>
            <translation>Messen</translation>
        </message>
        <message>
            <source>Plan</source>
            <translation>Plan</translation>
        </message>
        <message>
            <source>Timed tokens</source>
            <translation>Zeitmessung</translation>
        </message>
        <message>
            <source>Step {0}: {1}</source>
            <translation>Schritt {0}: {1}</translation>
        </message>
        <message>
            <source>Alt+{0}</source>
            <translation>Alt+{0}</translation>
        </message>
    </context>
    <context>
        <name>SummaryCard</name>
        <message>
            <source>Open Tune</source>
            <translation>Optimieren öffnen</translation>
        </message>
        <message>
            <source>The engine is starting.</source>
            <translation>Die Engine wird gestartet.</translation>
        </message>
        <message>
            <source>The model is loading.</source>
            <translation>Das Modell wird geladen.</translation>
        </message>
        <message>
            <source>The engine has stopped.</source>
            <translation>Die Engine wurde beendet.</translation>
        </message>
        <message>
            <source>Its recording is still here; the machine's lanes continue.</source>
            <translation>Ihre Aufzeichnung ist noch hier; die Spuren des Rechners laufen weiter.</translation>
        </message>
        <message>
            <source>Nothing computed yet.</source>
            <translation>Noch wurde nichts berechnet.</translation>
        </message>
        <message>
            <source>Ask something in Chat and watch it here.</source>
            <translation>Fragen Sie etwas im Chat und sehen Sie hier zu.</translation>
        </message>
        <message>
            <source>No model is loaded.</source>
            <translation>Kein Modell ist geladen.</translation>
        </message>
        <message>
            <source>The machine is still shown. Load a model in Settings, then ask something in Chat.</source>
            <translation>Der Rechner wird trotzdem gezeigt. Laden Sie in den Einstellungen ein Modell und fragen Sie dann etwas im Chat.</translation>
        </message>
        <message>
            <source>Nothing was decoded in this session.</source>
            <translation>In dieser Sitzung wurde nichts decodiert.</translation>
        </message>
        <message>
            <source>Nothing has been decoded yet.</source>
            <translation>Noch wurde nichts decodiert.</translation>
        </message>
        <message>
            <source>Their time went to: {0}.</source>
            <translation>Ihre Zeit ging an: {0}.</translation>
        </message>
        <message>
            <source>Its time went to: {0}.</source>
            <translation>Seine Zeit ging an: {0}.</translation>
        </message>
        <message>
            <source>Other programs used {0}% of the CPU, which slows everything down.</source>
            <translation>Andere Programme nutzten {0} % der CPU; das bremst alles.</translation>
        </message>
        <message>
            <source>A picture was read first, in {0} s.</source>
            <translation>Zuvor wurde ein Bild gelesen, in {0} s.</translation>
        </message>
        <message>
            <source>{0} pictures were read first, in {1} s.</source>
            <translation>Zuvor wurden {0} Bilder gelesen, in {1} s.</translation>
        </message>
        <message>
            <source>Batch: last {0} tokens, {1} per step, {2}/s.</source>
            <translation>Stapel: letzte {0} Token, {1} pro Schritt, {2}/s.</translation>
        </message>
        <message>
            <source>The last token took {0} ms.</source>
            <translation>Das letzte Token dauerte {0} ms.</translation>
        </message>
        <message numerus="yes">
            <source>Last {0} tokens, {1}/s.</source>
            <translation>
                <numerusform>Letztes {0} Token, {1}/s.</numerusform>
                <numerusform>Letzte {0} Token, {1}/s.</numerusform>
            </translation>
        </message>
        <message>
            <source>Close or pause them first; further advice needs an idle machine.</source>
            <translation>Schließen oder pausieren Sie sie zuerst; weiterer Rat braucht einen ruhigen Rechner.</translation>
        </message>
        <message>
            <source>{0} CPU threads would be about {1} times as fast (predicted).</source>
            <translation>{0} CPU-Threads wären etwa {1}-mal so schnell (vorhergesagt).</translation>
        </message>
        <message>
            <source>With {0} experts kept in VRAM it would be about {1} times as fast (predicted).</source>
            <translation>Mit {0} Experten im VRAM wäre es etwa {1}-mal so schnell (vorhergesagt).</translation>
        </message>
        <message>
            <source>With {0} experts kept in RAM it would be about {1} times as fast (predicted).</source>
            <translation>Mit {0} Experten im RAM wäre es etwa {1}-mal so schnell (vorhergesagt).</translation>
        </message>
        <message>
            <source>{0} weights would be about {1} times as fast (predicted).</source>
            <translation>Gewichte in {0} wären etwa {1}-mal so schnell (vorhergesagt).</translation>
        </message>
        <message>
            <source>No single change is predicted to gain over 5%.</source>
            <translation>Keine einzelne Änderung verspricht mehr als 5 %.</translation>
        </message>
    </context>
    <context>
        <name>SystemPromptPopover</name>
        <message>
            <source>System prompt</source>
            <translation>System-Prompt</translation>
        </message>
        <message>
            <source>Instructions the model reads first, such as who it is and how to answer.</source>
            <translation>Anweisungen, die das Modell zuerst liest, etwa wer es ist und wie es antworten soll.</translation>
        </message>
        <message>
            <source>You are a helpful assistant that answers in one sentence.</source>
            <translation>Du bist ein hilfreicher Assistent, der in einem Satz antwortet.</translation>
        </message>
    </context>
    <context>
        <name>TelemetryHub</name>
        <message>
            <source>{0} loaded</source>
            <translation>{0} geladen</translation>
        </message>
        <message>
            <source>The engine ended unexpectedly</source>
            <translation>Die Engine endete unerwartet</translation>
        </message>
        <message>
            <source>The engine ended</source>
            <translation>Die Engine wurde beendet</translation>
        </message>
        <message>
            <source>The engine's clock jumped</source>
            <translation>Die Uhr der Engine sprang</translation>
        </message>
        <message>
            <source>The session is no longer recorded: its file could not be written ({0}).</source>
            <translation>Die Sitzung wird nicht mehr aufgezeichnet: Ihre Datei konnte nicht geschrieben werden ({0}).</translation>
        </message>
    </context>
    <context>
        <name>TemplateCard</name>
        <message>
            <source>Prompt for each row</source>
            <translation>Prompt für jede Zeile</translation>
        </message>
        <message>
            <source>Template</source>
            <translation>Vorlage</translation>
        </message>
        <message>
            <source>Click a column to insert it at the cursor; it stands for each row's own text.</source>
            <translation>Ein Klick auf eine Spalte fügt sie an der Einfügemarke ein; sie steht für den Text jeder Zeile.</translation>
        </message>
        <message>
            <source>Column of pictures</source>
            <translation>Spalte mit Bildern</translation>
        </message>
        <message>
            <source>Its cells are paths of pictures, which begin in the file's folder, for a model that sees</source>
            <translation>Ihre Zellen sind Pfade von Bildern, ausgehend vom Ordner der Datei, für ein Modell, das Bilder sieht</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>System-Prompt</translation>
        </message>
        <message>
            <source>System prompt: instructions for every row (optional)</source>
            <translation>System-Prompt: Anweisungen für jede Zeile (optional)</translation>
        </message>
        <message>
            <source>Pictures: none</source>
            <translation>Bilder: keine</translation>
        </message>
        <message>
            <source>Pictures: {0}</source>
            <translation>Bilder: {0}</translation>
        </message>
        <message>
            <source>Insert column {0}</source>
            <translation>Spalte {0} einfügen</translation>
        </message>
        <message>
            <source>Summarise in one line: {0}</source>
            <translation>Fasse in einer Zeile zusammen: {0}</translation>
        </message>
        <message>
            <source>Describe the picture.</source>
            <translation>Beschreibe das Bild.</translation>
        </message>
        <message>
            <source>{0} reads text only, so rows with pictures get no answer: choose a model that sees.</source>
            <translation>{0} liest nur Text, deshalb erhalten Zeilen mit Bildern keine Antwort: Wählen Sie ein Modell, das Bilder sieht.</translation>
        </message>
        <message>
            <source>Write a prompt that includes a column.</source>
            <translation>Schreiben Sie einen Prompt, der eine Spalte enthält.</translation>
        </message>
    </context>
    <context>
        <name>Thought</name>
        <message>
            <source>Copy what it thought</source>
            <translation>Gedanken kopieren</translation>
        </message>
        <message>
            <source>Thinking</source>
            <translation>Nachdenken</translation>
        </message>
        <message>
            <source>Fold what the model thought</source>
            <translation>Gedanken des Modells zuklappen</translation>
        </message>
        <message>
            <source>Show what the model thought</source>
            <translation>Gedanken des Modells anzeigen</translation>
        </message>
        <message>
            <source>unfolded</source>
            <translation>aufgeklappt</translation>
        </message>
        <message>
            <source>folded</source>
            <translation>zugeklappt</translation>
        </message>
        <message>
            <source>What the model thought</source>
            <translation>Gedanken des Modells</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>Kopiert</translation>
        </message>
    </context>
    <context>
        <name>TierRow</name>
        <message>
            <source>Hit rate of the last three minutes of decoding, 0 to 100%</source>
            <translation>Trefferquote der letzten drei Minuten, 0 bis 100 %</translation>
        </message>
        <message>
            <source>{0} hits</source>
            <translation>{0} Treffer</translation>
        </message>
        <message>
            <source>{0}%</source>
            <translation>{0} %</translation>
        </message>
        <message>
            <source>{0}% overall</source>
            <translation>{0} % insgesamt</translation>
        </message>
        <message>
            <source>{0} of {1} experts</source>
            <translation>{0} von {1} Experten</translation>
        </message>
        <message>
            <source>Since the model was loaded: {0} of {1} lookups</source>
            <translation>Seit das Modell geladen wurde: {0} von {1} Zugriffen</translation>
        </message>
    </context>
    <context>
        <name>Timeline</name>
        <message>
            <source>Lane</source>
            <translation>Spur</translation>
        </message>
        <message>
            <source>Last</source>
            <translation>Zuletzt</translation>
        </message>
        <message>
            <source>Average</source>
            <translation>Mittel</translation>
        </message>
        <message>
            <source>Max</source>
            <translation>Max.</translation>
        </message>
        <message>
            <source>{0}, out</source>
            <translation>{0}, hinaus</translation>
        </message>
        <message>
            <source>{0}, whole machine</source>
            <translation>{0}, ganzer Rechner</translation>
        </message>
        <message>
            <source>Token of step {0}: {1}</source>
            <translation>Token von Schritt {0}: {1}</translation>
        </message>
        <message>
            <source>{0} tokens at {1}/s</source>
            <translation>{0} Token bei {1}/s</translation>
        </message>
        <message>
            <source>{0} hits per token</source>
            <translation>{0} Treffer pro Token</translation>
        </message>
        <message>
            <source>{0} fetched</source>
            <translation>{0} geholt</translation>
        </message>
        <message>
            <source>{0} on the CPU</source>
            <translation>{0} auf der CPU</translation>
        </message>
        <message>
            <source>layer {0}</source>
            <translation>Schicht {0}</translation>
        </message>
        <message>
            <source>expert {0}</source>
            <translation>Experte {0}</translation>
        </message>
        <message>
            <source>{0} {1} tokens</source>
            <translation>{0} {1} Token</translation>
        </message>
        <message>
            <source>This comes from a sensor or driver, not from the engine.</source>
            <translation>Dies kommt von einem Sensor oder Treiber, nicht von der Engine.</translation>
        </message>
        <message>
            <source>sampling and bookkeeping</source>
            <translation>Sampling und Verwaltung</translation>
        </message>
        <message>
            <source>experts</source>
            <translation>Experten</translation>
        </message>
        <message>
            <source>attention</source>
            <translation>Attention</translation>
        </message>
        <message>
            <source>hit</source>
            <translation>Treffer</translation>
        </message>
        <message>
            <source>fetched</source>
            <translation>geholt</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>writing</source>
            <translation>schreibt</translation>
        </message>
        <message>
            <source>reading</source>
            <translation>liest</translation>
        </message>
        <message>
            <source>waiting</source>
            <translation>wartet</translation>
        </message>
        <message>
            <source>in the background</source>
            <translation>im Hintergrund</translation>
        </message>
        <message>
            <source>written</source>
            <translation>geschrieben</translation>
        </message>
        <message>
            <source>read</source>
            <translation>gelesen</translation>
        </message>
        <message>
            <source>of jobs</source>
            <translation>von Aufträgen</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} von {1}</translation>
        </message>
        <message>
            <source>Move through time</source>
            <translation>Durch die Zeit bewegen</translation>
        </message>
        <message>
            <source>Move by almost a full view</source>
            <translation>Um fast eine ganze Ansicht bewegen</translation>
        </message>
        <message>
            <source>Zoom in, zoom out</source>
            <translation>Vergrößern, verkleinern</translation>
        </message>
        <message>
            <source>Space</source>
            <translation>Leertaste</translation>
        </message>
        <message>
            <source>Freeze the view, or follow live</source>
            <translation>Ansicht anhalten oder live folgen</translation>
        </message>
        <message>
            <source>Home</source>
            <translation>Pos1</translation>
        </message>
        <message>
            <source>Go back to now</source>
            <translation>Zurück zu jetzt</translation>
        </message>
        <message>
            <source>Move the crosshair; with Shift, farther</source>
            <translation>Fadenkreuz bewegen; mit Umschalt weiter</translation>
        </message>
        <message>
            <source>Select the previous or next token</source>
            <translation>Vorheriges oder nächstes Token wählen</translation>
        </message>
        <message>
            <source>Select a range</source>
            <translation>Bereich wählen</translation>
        </message>
        <message>
            <source>Enter</source>
            <translation>Eingabe</translation>
        </message>
        <message>
            <source>Zoom to the selected token or range</source>
            <translation>Auf das gewählte Token oder den Bereich zoomen</translation>
        </message>
        <message>
            <source>Esc</source>
            <translation>Esc</translation>
        </message>
        <message>
            <source>Clear the selection</source>
            <translation>Auswahl aufheben</translation>
        </message>
        <message>
            <source>waiting for {0}</source>
            <translation>wartet auf {0}</translation>
        </message>
        <message>
            <source>written at {0} ×{1}</source>
            <translation>geschrieben auf {0} ×{1}</translation>
        </message>
        <message>
            <source>ceiling {0} GB/s</source>
            <translation>Obergrenze {0} GB/s</translation>
        </message>
        <message>
            <source>token ticks</source>
            <translation>Token-Marken</translation>
        </message>
    </context>
    <context>
        <name>TimelineCard</name>
        <message>
            <source>Hover to read every lane, drag to average, wheel or ↑ ↓ to zoom, ← → to move.</source>
            <translation>Zeigen liest jede Spur ab, Ziehen mittelt, Rad oder ↑ ↓ zoomt, ← → bewegt.</translation>
        </message>
        <message>
            <source>Machine</source>
            <translation>Rechner</translation>
        </message>
        <message>
            <source>Lanes of the machine's own sensors, below the engine's</source>
            <translation>Spuren der Sensoren des Rechners, unter denen der Engine</translation>
        </message>
        <message>
            <source>Show the machine's sensors</source>
            <translation>Sensoren des Rechners zeigen</translation>
        </message>
        <message>
            <source>Timeline as a table</source>
            <translation>Zeitleiste als Tabelle</translation>
        </message>
        <message>
            <source>Table</source>
            <translation>Tabelle</translation>
        </message>
        <message>
            <source>The same lanes as numbers</source>
            <translation>Dieselben Spuren als Zahlen</translation>
        </message>
        <message>
            <source>Show the lanes as a table</source>
            <translation>Spuren als Tabelle zeigen</translation>
        </message>
    </context>
    <context>
        <name>TimelineStrip</name>
        <message>
            <source>Machine activity</source>
            <translation>Aktivität des Rechners</translation>
        </message>
        <message>
            <source>The last 20 seconds. Click for the Monitor.</source>
            <translation>Die letzten 20 Sekunden. Klicken öffnet den Monitor.</translation>
        </message>
    </context>
    <context>
        <name>TimelineView</name>
        <message>
            <source>Timeline</source>
            <translation>Zeitleiste</translation>
        </message>
        <message>
            <source>Arrow keys move and zoom, Space freezes, Home returns to now, comma and full stop move the crosshair, square brackets step through tokens, Enter zooms to a token. The table has the same data as text.</source>
            <translation>Pfeiltasten bewegen und zoomen, die Leertaste hält an, Pos1 kehrt zu jetzt zurück, Komma und Punkt bewegen das Fadenkreuz, eckige Klammern gehen von Token zu Token, Eingabe zoomt auf ein Token. Die Tabelle enthält dieselben Daten als Text.</translation>
        </message>
        <message>
            <source>now</source>
            <translation>jetzt</translation>
        </message>
    </context>
    <context>
        <name>TitleBar</name>
        <message>
            <source>Model: {0}</source>
            <translation>Modell: {0}</translation>
        </message>
        <message>
            <source>Cancel loading</source>
            <translation>Laden abbrechen</translation>
        </message>
        <message>
            <source>Start a new chat</source>
            <translation>Neuen Chat beginnen</translation>
        </message>
        <message>
            <source>New chat</source>
            <translation>Neuer Chat</translation>
        </message>
        <message>
            <source>Ctrl N</source>
            <translation>Strg N</translation>
        </message>
        <message>
            <source>Chats  Ctrl+K</source>
            <translation>Chats  Strg+K</translation>
        </message>
        <message>
            <source>List of chats</source>
            <translation>Liste der Chats</translation>
        </message>
        <message>
            <source>Double-click or press F2 to rename</source>
            <translation>Zum Umbenennen doppelklicken oder F2 drücken</translation>
        </message>
        <message>
            <source>engine stopped</source>
            <translation>Engine beendet</translation>
        </message>
        <message>
            <source>engine not responding</source>
            <translation>Engine reagiert nicht</translation>
        </message>
        <message>
            <source>loading {0}</source>
            <translation>{0} wird geladen</translation>
        </message>
        <message>
            <source>starting the engine</source>
            <translation>Engine wird gestartet</translation>
        </message>
        <message>
            <source>no model loaded</source>
            <translation>kein Modell geladen</translation>
        </message>
        <message>
            <source>tuned</source>
            <translation>optimiert</translation>
        </message>
        <message>
            <source>server not in the list</source>
            <translation>Server nicht in der Liste</translation>
        </message>
        <message>
            <source>its only model</source>
            <translation>sein einziges Modell</translation>
        </message>
        <message>
            <source>{0} · sent to {1}</source>
            <translation>{0} · an {1} gesendet</translation>
        </message>
        <message>
            <source>the model</source>
            <translation>das Modell</translation>
        </message>
        <message>
            <source>{0} experts per layer, {1} per token</source>
            <translation>{0} Experten pro Schicht, {1} pro Token</translation>
        </message>
        <message>
            <source>Speed: of the last answer</source>
            <translation>Tempo: der letzten Antwort</translation>
        </message>
    </context>
    <context>
        <name>TokenCard</name>
        <message>
            <source>Per token</source>
            <translation>Pro Token</translation>
        </message>
        <message>
            <source>What one token, a word or a part of one, costs on average. Of the experts that it used, a hit was already in the graphics card’s memory; a miss was fetched or computed on the processor.</source>
            <translation>Was ein Token, ein Wort oder ein Teil davon, im Mittel kostet. Von den genutzten Experten lag ein Treffer schon im Speicher der Grafikkarte; ein Fehlzugriff wurde geholt oder auf dem Prozessor berechnet.</translation>
        </message>
        <message>
            <source>Experts used</source>
            <translation>Genutzte Experten</translation>
        </message>
        <message>
            <source>in VRAM (hit)</source>
            <translation>im VRAM (Treffer)</translation>
        </message>
        <message>
            <source>fetched (miss)</source>
            <translation>geholt (Fehlzugriff)</translation>
        </message>
        <message>
            <source>on the CPU</source>
            <translation>auf der CPU</translation>
        </message>
        <message>
            <source>Time</source>
            <translation>Zeit</translation>
        </message>
        <message>
            <source>To the GPU</source>
            <translation>Zur GPU</translation>
        </message>
        <message>
            <source>From disk</source>
            <translation>Vom Datenträger</translation>
        </message>
        <message>
            <source>Energy</source>
            <translation>Energie</translation>
        </message>
        <message>
            <source>{0} ms</source>
            <translation>{0} ms</translation>
        </message>
        <message>
            <source>{0} J</source>
            <translation>{0} J</translation>
        </message>
        <message>
            <source>not available here</source>
            <translation>hier nicht verfügbar</translation>
        </message>
        <message>
            <source>Neither a graphics card nor the processor reports its power here (NVML, RAPL).</source>
            <translation>Weder eine Grafikkarte noch der Prozessor meldet hier seine Leistungsaufnahme (NVML, RAPL).</translation>
        </message>
        <message>
            <source>Power as graphics cards and processors report it, over the tokens' time; now {0} W.</source>
            <translation>Leistungsaufnahme, wie Grafikkarten und Prozessoren sie melden, über die Zeit der Token; jetzt {0} W.</translation>
        </message>
        <message>
            <source>Mean of the last {0} tokens</source>
            <translation>Mittel der letzten {0} Token</translation>
        </message>
        <message>
            <source>Mean of the last {0} batch tokens, {1} per step</source>
            <translation>Mittel der letzten {0} Stapel-Token, {1} pro Schritt</translation>
        </message>
    </context>
    <context>
        <name>TokenDialog</name>
        <message>
            <source>Save and download</source>
            <translation>Speichern und herunterladen</translation>
        </message>
        <message>
            <source>Access to {0}</source>
            <translation>Zugriff auf {0}</translation>
        </message>
        <message>
            <source>1. Open the page of {0}, sign in, and accept what is asked there.</source>
            <translation>1. Öffnen Sie die Seite von {0}, melden Sie sich an und stimmen Sie dem zu, was dort verlangt wird.</translation>
        </message>
        <message>
            <source>Open {0}</source>
            <translation>{0} öffnen</translation>
        </message>
        <message>
            <source>2. Create an access token (reading is enough) in your settings there, and paste it here.</source>
            <translation>2. Erstellen Sie dort in Ihren Einstellungen ein Zugriffstoken (Lesen genügt) und fügen Sie es hier ein.</translation>
        </message>
        <message>
            <source>Access token</source>
            <translation>Zugriffstoken</translation>
        </message>
        <message>
            <source>Its makers ask you to accept their terms first</source>
            <translation>Die Entwickler verlangen zuerst Ihre Zustimmung zu ihren Bedingungen</translation>
        </message>
        <message>
            <source>It is kept in the system's keyring, or for this run only where there is none, and sent to {0} alone.</source>
            <translation>Es kommt in den Schlüsselbund des Systems oder gilt, wo es keinen gibt, nur bis zum Beenden, und wird nur an {0} gesendet.</translation>
        </message>
    </context>
    <context>
        <name>TokenRows</name>
        <message>
            <source>Remove token</source>
            <translation>Token entfernen</translation>
        </message>
        <message>
            <source>Remove the token for {0}</source>
            <translation>Token für {0} entfernen</translation>
        </message>
    </context>
    <context>
        <name>ToolServerDialog</name>
        <message>
            <source>Save</source>
            <translation>Speichern</translation>
        </message>
        <message>
            <source>Test</source>
            <translation>Testen</translation>
        </message>
        <message>
            <source>Add a server with tools</source>
            <translation>Server mit Werkzeugen hinzufügen</translation>
        </message>
        <message>
            <source>Name</source>
            <translation>Name</translation>
        </message>
        <message>
            <source>for example files</source>
            <translation>zum Beispiel Dateien</translation>
        </message>
        <message>
            <source>Command</source>
            <translation>Befehl</translation>
        </message>
        <message>
            <source>or address</source>
            <translation>oder Adresse</translation>
        </message>
        <message>
            <source>Variables or headers</source>
            <translation>Variablen oder Header</translation>
        </message>
        <message>
            <source>NAME=value, one on each line</source>
            <translation>NAME=Wert, einer je Zeile</translation>
        </message>
        <message>
            <source>Values are kept in the system's keyring, or for this run only where there is none. ${NAME} in a value is read from the environment.</source>
            <translation>Werte liegen im Schlüsselbund des Systems oder gelten, wo es keinen gibt, nur bis zum Beenden. ${NAME} in einem Wert wird aus der Umgebung gelesen.</translation>
        </message>
        <message>
            <source>or JSON</source>
            <translation>oder JSON</translation>
        </message>
        <message>
            <source>The command has a quote that does not end: correct it.</source>
            <translation>Der Befehl hat ein Anführungszeichen, das nicht schließt: Korrigieren Sie ihn.</translation>
        </message>
        <message>
            <source>Each variable or header is NAME=value, on a line of its own.</source>
            <translation>Jede Variable oder jeder Header ist NAME=Wert, in einer eigenen Zeile.</translation>
        </message>
        <message>
            <source>Enter the variables or headers again: they are kept for the old command or address alone.</source>
            <translation>Geben Sie die Variablen oder Header noch einmal ein: Sie gelten nur für den alten Befehl oder die alte Adresse.</translation>
        </message>
        <message>
            <source>There is a server named {0}: choose another name.</source>
            <translation>Es gibt schon einen Server namens {0}: Wählen Sie einen anderen Namen.</translation>
        </message>
        <message>
            <source>Starting…</source>
            <translation>Wird gestartet…</translation>
        </message>
    </context>
    <context>
        <name>Tools</name>
        <message numerus="yes">
            <source>It answers: {0} tools.</source>
            <translation>
                <numerusform>Er antwortet: {0} Werkzeug.</numerusform>
                <numerusform>Er antwortet: {0} Werkzeuge.</numerusform>
            </translation>
        </message>
        <message>
            <source>not allowed</source>
            <translation>nicht erlaubt</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>fehlgeschlagen</translation>
        </message>
        <message>
            <source>done in {0}</source>
            <translation>fertig in {0}</translation>
        </message>
        <message>
            <source>stopped</source>
            <translation>angehalten</translation>
        </message>
        <message>
            <source>running…</source>
            <translation>läuft…</translation>
        </message>
        <message>
            <source>waits for you</source>
            <translation>wartet auf Sie</translation>
        </message>
    </context>
    <context>
        <name>ToolsCard</name>
        <message>
            <source>Tools</source>
            <translation>Werkzeuge</translation>
        </message>
        <message>
            <source>Calculator</source>
            <translation>Rechner</translation>
        </message>
        <message>
            <source>Computes what models get wrong. Runs without asking.</source>
            <translation>Rechnet, was Modelle falsch machen. Läuft ohne Rückfrage.</translation>
        </message>
        <message>
            <source>Clock</source>
            <translation>Uhr</translation>
        </message>
        <message>
            <source>Tells the date and the time. Runs without asking.</source>
            <translation>Nennt Datum und Uhrzeit. Läuft ohne Rückfrage.</translation>
        </message>
        <message>
            <source>Read a file</source>
            <translation>Eine Datei lesen</translation>
        </message>
        <message>
            <source>Of folders that are attached to the chat.</source>
            <translation>Aus Ordnern, die dem Chat angehängt sind.</translation>
        </message>
        <message>
            <source>Run a batch</source>
            <translation>Einen Stapel ausführen</translation>
        </message>
        <message>
            <source>Starts a job that answers a prompt for each of many rows.</source>
            <translation>Startet einen Auftrag, der einen Prompt für jede von vielen Zeilen beantwortet.</translation>
        </message>
        <message>
            <source>Search documents</source>
            <translation>Dokumente durchsuchen</translation>
        </message>
        <message>
            <source>Those that are attached to the chat. Runs without asking.</source>
            <translation>Die, die dem Chat angehängt sind. Läuft ohne Rückfrage.</translation>
        </message>
        <message>
            <source>Offered to the model in chats where the switch at the message box is on. Before a tool runs you are asked, unless you allowed it.</source>
            <translation>Werden dem Modell in Chats angeboten, in denen der Schalter am Eingabefeld an ist. Bevor ein Werkzeug läuft, werden Sie gefragt, wenn Sie es nicht schon erlaubt haben.</translation>
        </message>
        <message>
            <source>Ask again for all</source>
            <translation>Bei allen wieder fragen</translation>
        </message>
        <message>
            <source>Always allowed</source>
            <translation>Immer erlaubt</translation>
        </message>
        <message>
            <source>Add…</source>
            <translation>Hinzufügen…</translation>
        </message>
        <message>
            <source>Add a server with tools</source>
            <translation>Server mit Werkzeugen hinzufügen</translation>
        </message>
        <message>
            <source>Programs or addresses that bring tools by the Model Context Protocol, such as a web search. A program runs on this PC with your rights: add only what you trust.</source>
            <translation>Programme oder Adressen, die über das Model Context Protocol Werkzeuge bringen, etwa eine Websuche. Ein Programm läuft auf diesem PC mit Ihren Rechten: Fügen Sie nur hinzu, wem Sie vertrauen.</translation>
        </message>
        <message>
            <source>MCP servers</source>
            <translation>MCP-Server</translation>
        </message>
        <message>
            <source>No tool yet.</source>
            <translation>Noch kein Werkzeug.</translation>
        </message>
        <message>
            <source>Offer the tools of {0}</source>
            <translation>Werkzeuge von {0} anbieten</translation>
        </message>
        <message>
            <source>Edit…</source>
            <translation>Bearbeiten…</translation>
        </message>
        <message>
            <source>Edit {0}</source>
            <translation>{0} bearbeiten</translation>
        </message>
        <message>
            <source>Remove</source>
            <translation>Entfernen</translation>
        </message>
        <message>
            <source>Remove {0}</source>
            <translation>{0} entfernen</translation>
        </message>
        <message>
            <source>Its variables or headers are known for this run only: this system has no keyring.</source>
            <translation>Seine Variablen oder Header gelten nur bis zum Beenden: Dieses System hat keinen Schlüsselbund.</translation>
        </message>
        <message>
            <source>Its tools are asked for when a chat needs them.</source>
            <translation>Seine Werkzeuge werden erfragt, wenn ein Chat sie braucht.</translation>
        </message>
        <message>
            <source>It offers no tools; its prompts and resources are not used here.</source>
            <translation>Er bietet keine Werkzeuge; seine Prompts und Ressourcen werden hier nicht verwendet.</translation>
        </message>
        <message numerus="yes">
            <source>{0} tools: {1}</source>
            <translation>
                <numerusform>{0} Werkzeug: {1}</numerusform>
                <numerusform>{0} Werkzeuge: {1}</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>Transcript</name>
        <message>
            <source>Conversation</source>
            <translation>Gespräch</translation>
        </message>
        <message>
            <source>Jump to the latest</source>
            <translation>Zum Neuesten springen</translation>
        </message>
    </context>
    <context>
        <name>Tray</name>
        <message>
            <source>Switchyard is still running</source>
            <translation>Switchyard läuft weiter</translation>
        </message>
        <message>
            <source>Its window is hidden; the icon here opens it, asks a question, or quits.</source>
            <translation>Sein Fenster ist ausgeblendet; das Symbol hier öffnet es, stellt eine Frage oder beendet das Programm.</translation>
        </message>
        <message>
            <source>Quick question…</source>
            <translation>Schnelle Frage…</translation>
        </message>
        <message>
            <source>Open Switchyard</source>
            <translation>Switchyard öffnen</translation>
        </message>
        <message>
            <source>Quit</source>
            <translation>Beenden</translation>
        </message>
    </context>
    <context>
        <name>Tune</name>
        <message>
            <source>measured on this machine</source>
            <translation>auf diesem Rechner gemessen</translation>
        </message>
        <message>
            <source>reported by the driver or the system</source>
            <translation>vom Treiber oder System gemeldet</translation>
        </message>
        <message>
            <source>assumed, from data sheets</source>
            <translation>angenommen, aus Datenblättern</translation>
        </message>
        <message>
            <source>about {0}</source>
            <translation>etwa {0}</translation>
        </message>
        <message>
            <source>just measured</source>
            <translation>eben gemessen</translation>
        </message>
        <message>
            <source>The CPU computes everything.</source>
            <translation>Die CPU berechnet alles.</translation>
        </message>
        <message>
            <source>{0} is part of the processor</source>
            <translation>{0} ist Teil des Prozessors</translation>
        </message>
        <message>
            <source>No graphics card</source>
            <translation>Keine Grafikkarte</translation>
        </message>
        <message>
            <source>not used by the engine</source>
            <translation>von der Engine nicht genutzt</translation>
        </message>
        <message>
            <source>reported by the engine</source>
            <translation>von der Engine gemeldet</translation>
        </message>
        <message>
            <source>and {0} more: {1}</source>
            <translation>und {0} weitere: {1}</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>{0}, emulated in RAM</source>
            <translation>{0}, im RAM emuliert</translation>
        </message>
        <message>
            <source>{0}, {1} free</source>
            <translation>{0}, {1} frei</translation>
        </message>
        <message>
            <source>driver {0}</source>
            <translation>Treiber {0}</translation>
        </message>
        <message>
            <source>1 core</source>
            <translation>1 Kern</translation>
        </message>
        <message numerus="yes">
            <source>{0} cores</source>
            <translation>
                <numerusform>{0} Kern</numerusform>
                <numerusform>{0} Kerne</numerusform>
            </translation>
        </message>
        <message>
            <source>best with 1 thread</source>
            <translation>am besten mit 1 Thread</translation>
        </message>
        <message numerus="yes">
            <source>best with {0} threads</source>
            <translation>
                <numerusform>am besten mit {0} Thread</numerusform>
                <numerusform>am besten mit {0} Threads</numerusform>
            </translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>the container's limit</source>
            <translation>die Grenze des Containers</translation>
        </message>
        <message>
            <source>the limit set for WSL</source>
            <translation>die für WSL gesetzte Grenze</translation>
        </message>
        <message>
            <source>pinnable: {0}</source>
            <translation>anheftbar: {0}</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>It does not respond.</source>
            <translation>Reagiert nicht.</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>Datenträger</translation>
        </message>
        <message>
            <source>{0} free</source>
            <translation>{0} frei</translation>
        </message>
        <message>
            <source>hard disk</source>
            <translation>Festplatte</translation>
        </message>
        <message>
            <source>network share</source>
            <translation>Netzlaufwerk</translation>
        </message>
        <message>
            <source>in memory</source>
            <translation>im Speicher</translation>
        </message>
        <message>
            <source>disk of the host</source>
            <translation>Datenträger des Hosts</translation>
        </message>
        <message>
            <source>disk</source>
            <translation>Datenträger</translation>
        </message>
        <message>
            <source>{0} up</source>
            <translation>{0} hinauf</translation>
        </message>
        <message>
            <source>{0} down</source>
            <translation>{0} hinunter</translation>
        </message>
        <message>
            <source>reading RAM</source>
            <translation>RAM lesen</translation>
        </message>
        <message>
            <source>Looking up the hardware</source>
            <translation>Hardware wird ermittelt</translation>
        </message>
        <message>
            <source>Waiting for other programs, which use {0} of the CPU</source>
            <translation>Auf andere Programme wird gewartet, die {0} der CPU nutzen</translation>
        </message>
        <message>
            <source>Measuring {0}</source>
            <translation>Messung: {0}</translation>
        </message>
        <message>
            <source>Measuring</source>
            <translation>Messung läuft</translation>
        </message>
        <message>
            <source>Planning</source>
            <translation>Planung läuft</translation>
        </message>
        <message>
            <source>Loading: {0}</source>
            <translation>Wird geladen: {0}</translation>
        </message>
        <message>
            <source>Timing real tokens: {0}</source>
            <translation>Echte Token werden gemessen: {0}</translation>
        </message>
        <message>
            <source>Loading {0} again</source>
            <translation>{0} wird wieder geladen</translation>
        </message>
        <message>
            <source>Reading RAM</source>
            <translation>RAM lesen</translation>
        </message>
        <message>
            <source>CPU arithmetic</source>
            <translation>CPU-Rechenleistung</translation>
        </message>
        <message>
            <source>Experts on the CPU</source>
            <translation>Experten auf der CPU</translation>
        </message>
        <message>
            <source>GPU arithmetic</source>
            <translation>GPU-Rechenleistung</translation>
        </message>
        <message>
            <source>Reading VRAM</source>
            <translation>VRAM lesen</translation>
        </message>
        <message>
            <source>Experts on the GPU</source>
            <translation>Experten auf der GPU</translation>
        </message>
        <message>
            <source>RAM to the card</source>
            <translation>RAM zur Karte</translation>
        </message>
        <message>
            <source>Card to RAM</source>
            <translation>Karte zum RAM</translation>
        </message>
        <message>
            <source>Reading the disk</source>
            <translation>Datenträger lesen</translation>
        </message>
        <message>
            <source>Decoding</source>
            <translation>Decodieren</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} Token/s</translation>
        </message>
        <message>
            <source>About {0} tokens/s</source>
            <translation>Etwa {0} Token/s</translation>
        </message>
        <message>
            <source>predicted, {0} to {1} on an idle machine; first token after about {2} s</source>
            <translation>vorhergesagt, {0} bis {1} auf einem ruhigen Rechner; erstes Token nach etwa {2} s</translation>
        </message>
        <message>
            <source>measured with real tokens on {0}</source>
            <translation>mit echten Token auf {0} gemessen</translation>
        </message>
        <message>
            <source>{0}: use this figure. The prediction was {1}, {2}% too high: it adds up what memory and processor can do, and leaves out the engine's overhead.</source>
            <translation>{0}: Verwenden Sie diese Zahl. Die Vorhersage war {1}, {2} % zu hoch: Sie zählt zusammen, was Speicher und Prozessor leisten können, und lässt den Aufwand der Engine weg.</translation>
        </message>
        <message>
            <source>{0}: use this figure. The prediction was {1}, {2}% too low: it is based on memory and processor measured one at a time, and together they are faster.</source>
            <translation>{0}: Verwenden Sie diese Zahl. Die Vorhersage war {1}, {2} % zu niedrig: Sie beruht auf einzeln gemessenem Speicher und Prozessor, und zusammen sind sie schneller.</translation>
        </message>
        <message>
            <source>1 thread</source>
            <translation>1 Thread</translation>
        </message>
        <message numerus="yes">
            <source>{0} threads</source>
            <translation>
                <numerusform>{0} Thread</numerusform>
                <numerusform>{0} Threads</numerusform>
            </translation>
        </message>
        <message>
            <source>all experts on the card</source>
            <translation>alle Experten auf der Karte</translation>
        </message>
        <message>
            <source>{0} expert slots</source>
            <translation>{0} Experten-Plätze</translation>
        </message>
        <message>
            <source>about {0}% hits</source>
            <translation>etwa {0} % Treffer</translation>
        </message>
        <message>
            <source>Not enough disk space: {0} of experts need it, and {1} are free.</source>
            <translation>Nicht genug Platz auf dem Datenträger: {0} an Experten brauchen ihn, und {1} sind frei.</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>experts read on demand</source>
            <translation>Experten, bei Bedarf gelesen</translation>
        </message>
        <message>
            <source>layers read for each token</source>
            <translation>Schichten, für jedes Token gelesen</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>Startmodell</translation>
        </message>
    </context>
    <context>
        <name>TuneCards</name>
        <message>
            <source>Your machine</source>
            <translation>Ihr Rechner</translation>
        </message>
        <message>
            <source>Wider links have more bandwidth; hollow ones are assumed.</source>
            <translation>Breitere Verbindungen haben mehr Bandbreite; hohle sind angenommen.</translation>
        </message>
        <message>
            <source>Looking up the hardware…</source>
            <translation>Hardware wird ermittelt…</translation>
        </message>
        <message>
            <source>Where to compute</source>
            <translation>Wo gerechnet wird</translation>
        </message>
    </context>
    <context>
        <name>TunePage</name>
        <message>
            <source>Tune</source>
            <translation>Optimieren</translation>
        </message>
        <message>
            <source>What if…</source>
            <translation>Was wäre, wenn…</translation>
        </message>
        <message>
            <source>Copy report</source>
            <translation>Bericht kopieren</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>Schließen</translation>
        </message>
        <message>
            <source>Cancel tuning</source>
            <translation>Optimierung abbrechen</translation>
        </message>
        <message>
            <source>Your hardware has changed since the last tuning. {0} Tune again.</source>
            <translation>Ihre Hardware hat sich seit der letzten Optimierung geändert. {0} Optimieren Sie erneut.</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>Startmodell</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>Kopiert</translation>
        </message>
    </context>
    <context>
        <name>UnsavedTextGuard</name>
        <message>
            <source>The latest messages are not saved.</source>
            <translation>Die neuesten Nachrichten sind nicht gespeichert.</translation>
        </message>
        <message>
            <source>If you close the window now, they are lost.</source>
            <translation>Wenn Sie das Fenster jetzt schließen, sind sie verloren.</translation>
        </message>
        <message>
            <source>Keep the window open</source>
            <translation>Fenster offen lassen</translation>
        </message>
        <message>
            <source>Close and lose them</source>
            <translation>Schließen und verlieren</translation>
        </message>
    </context>
    <context>
        <name>Updates</name>
        <message>
            <source>The installation was stopped. Nothing has changed: try again.</source>
            <translation>Die Installation wurde angehalten. Nichts hat sich geändert: Versuchen Sie es erneut.</translation>
        </message>
    </context>
    <context>
        <name>UpdatesCard</name>
        <message>
            <source>Check now</source>
            <translation>Jetzt suchen</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>Herunterladen</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Abbrechen</translation>
        </message>
        <message>
            <source>Switchyard {0}</source>
            <translation>Switchyard {0}</translation>
        </message>
        <message>
            <source>Go back</source>
            <translation>Zurückkehren</translation>
        </message>
        <message>
            <source>Previous version</source>
            <translation>Vorherige Version</translation>
        </message>
        <message>
            <source>the official one</source>
            <translation>der offizielle</translation>
        </message>
        <message>
            <source>Where newer versions come from. Only versions signed by Switchyard's developers are installed.</source>
            <translation>Woher neuere Versionen kommen. Installiert wird nur, was die Entwickler von Switchyard signiert haben.</translation>
        </message>
        <message>
            <source>Update server</source>
            <translation>Aktualisierungsserver</translation>
        </message>
        <message>
            <source>{0} is kept. Going back takes effect at the next start.</source>
            <translation>{0} ist aufbewahrt. Die Rückkehr gilt ab dem nächsten Start.</translation>
        </message>
        <message>
            <source>There is none.</source>
            <translation>Es gibt keine.</translation>
        </message>
        <message>
            <source>{0} is available ({1}).</source>
            <translation>{0} ist verfügbar ({1}).</translation>
        </message>
        <message>
            <source>Not checked yet.</source>
            <translation>Noch nicht gesucht.</translation>
        </message>
        <message>
            <source>Checking…</source>
            <translation>Wird geprüft…</translation>
        </message>
        <message>
            <source>This is the newest version.</source>
            <translation>Dies ist die neueste Version.</translation>
        </message>
        <message>
            <source>Downloading {0}…</source>
            <translation>{0} wird heruntergeladen…</translation>
        </message>
        <message>
            <source>{0} will be installed when answers and jobs are done.</source>
            <translation>{0} wird installiert, wenn Antworten und Aufträge fertig sind.</translation>
        </message>
        <message>
            <source>Installing and testing {0}…</source>
            <translation>{0} wird installiert und getestet…</translation>
        </message>
        <message>
            <source>Restart Switchyard to use the other version.</source>
            <translation>Starten Sie Switchyard neu, um die andere Version zu nutzen.</translation>
        </message>
        <message>
            <source>Nothing has changed.</source>
            <translation>Nichts hat sich geändert.</translation>
        </message>
    </context>
    <context>
        <name>UserMessage</name>
        <message>
            <source>Copy</source>
            <translation>Kopieren</translation>
        </message>
        <message>
            <source>Edit the message</source>
            <translation>Nachricht bearbeiten</translation>
        </message>
        <message>
            <source>Ask this of every row of a file</source>
            <translation>Dies für jede Zeile einer Datei fragen</translation>
        </message>
        <message>
            <source>Delete this message</source>
            <translation>Diese Nachricht löschen</translation>
        </message>
        <message>
            <source>You: {0}</source>
            <translation>Sie: {0}</translation>
        </message>
        <message>
            <source>Edit message</source>
            <translation>Nachricht bearbeiten</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Abbrechen</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>Speichern</translation>
        </message>
        <message>
            <source>Changes the message; the answers after it stay.</source>
            <translation>Ändert die Nachricht; die Antworten danach bleiben.</translation>
        </message>
        <message>
            <source>Send as new version</source>
            <translation>Neu senden</translation>
        </message>
    </context>
    <context>
        <name>VersionSwitch</name>
        <message>
            <source>Earlier version</source>
            <translation>Frühere Version</translation>
        </message>
        <message>
            <source>Later version</source>
            <translation>Spätere Version</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} von {1}</translation>
        </message>
    </context>
    <context>
        <name>Versions</name>
        <message>
            <source>You started Switchyard {0}, and this window is {1}: close it, then start the other.</source>
            <translation>Sie haben Switchyard {0} gestartet, und dieses Fenster ist {1}: Schließen Sie es und starten Sie dann das andere.</translation>
        </message>
    </context>
    <context>
        <name>WhatIfCard</name>
        <message>
            <source>What if this machine had…</source>
            <translation>Angenommen, dieser Rechner hätte…</translation>
        </message>
        <message>
            <source>A few letters, such as 4090</source>
            <translation>Ein paar Zeichen, etwa 4090</translation>
        </message>
        <message>
            <source>Graphics card as it is</source>
            <translation>Jetzige Grafikkarte</translation>
        </message>
        <message>
            <source> GB of VRAM</source>
            <translation> GB VRAM</translation>
        </message>
        <message>
            <source>VRAM as it is</source>
            <translation>Jetziger VRAM</translation>
        </message>
        <message>
            <source> GB of RAM</source>
            <translation> GB RAM</translation>
        </message>
        <message>
            <source>RAM as it is</source>
            <translation>Jetziger RAM</translation>
        </message>
        <message>
            <source> GB/s to the card</source>
            <translation> GB/s zur Karte</translation>
        </message>
        <message>
            <source>Link as it is</source>
            <translation>Jetzige Verbindung</translation>
        </message>
        <message>
            <source> GB/s from disk</source>
            <translation> GB/s vom Datenträger</translation>
        </message>
        <message>
            <source>Disk as it is</source>
            <translation>Jetziges Laufwerk</translation>
        </message>
        <message>
            <source>Graphics card</source>
            <translation>Grafikkarte</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>Link to the card</source>
            <translation>Verbindung zur Karte</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>Datenträger</translation>
        </message>
        <message>
            <source>Reset</source>
            <translation>Zurücksetzen</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>Schließen</translation>
        </message>
        <message>
            <source>Change something above to see its effect.</source>
            <translation>Ändern Sie oben etwas, um die Wirkung zu sehen.</translation>
        </message>
        <message>
            <source>The link needs a graphics card: choose one first.</source>
            <translation>Die Verbindung braucht eine Grafikkarte: Wählen Sie zuerst eine.</translation>
        </message>
        <message>
            <source>Planning…</source>
            <translation>Plan wird berechnet…</translation>
        </message>
        <message>
            <source>It would fit, at about {0} tokens/s</source>
            <translation>Es würde passen, mit etwa {0} Token/s</translation>
        </message>
        <message>
            <source>About {1} tokens/s: as fast as now</source>
            <translation>Etwa {1} Token/s: so schnell wie jetzt</translation>
        </message>
        <message>
            <source>{0} tokens/s now, measured → about {1} predicted, {2} times as fast</source>
            <translation>{0} Token/s jetzt, gemessen → etwa {1} vorhergesagt, {2}-mal so schnell</translation>
        </message>
        <message>
            <source>About {0} → about {1} tokens/s, {2} times as fast</source>
            <translation>Etwa {0} → etwa {1} Token/s, {2}-mal so schnell</translation>
        </message>
    </context>
    <context>
        <name>WorkLine</name>
        <message>
            <source>Stop</source>
            <translation>Stoppen</translation>
        </message>
    </context>
    <context>
        <name>WorkerProcess</name>
        <message>
            <source>The engine sent an invalid message: {0}</source>
            <translation>Die Engine hat eine ungültige Nachricht gesendet: {0}</translation>
        </message>
        <message>
            <source>The engine could not be started ({0}): reinstall Switchyard.</source>
            <translation>Die Engine konnte nicht gestartet werden ({0}): Installieren Sie Switchyard neu.</translation>
        </message>
    </context>
    <context>
        <name>_GpuRow</name>
        <message>
            <source>Busy</source>
            <translation>Last</translation>
        </message>
        <message>
            <source>VRAM: ours; hatched: other programs</source>
            <translation>VRAM: unserer; schraffiert: andere Programme</translation>
        </message>
        <message>
            <source>GPU {0}</source>
            <translation>GPU {0}</translation>
        </message>
        <message>
            <source>{0}% busy</source>
            <translation>{0} % ausgelastet</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} von {1}</translation>
        </message>
        <message>
            <source>not responding</source>
            <translation>reagiert nicht</translation>
        </message>
        <message>
            <source>{0} GHz</source>
            <translation>{0} GHz</translation>
        </message>
        <message>
            <source>memory {0} GHz</source>
            <translation>Speicher {0} GHz</translation>
        </message>
        <message>
            <source>{0} W</source>
            <translation>{0} W</translation>
        </message>
        <message>
            <source>{0} °C</source>
            <translation>{0} °C</translation>
        </message>
        <message>
            <source>PCIe {0} in, {1} out GB/s</source>
            <translation>PCIe {0} ein, {1} aus GB/s</translation>
        </message>
        <message>
            <source>slowed by {0}</source>
            <translation>gebremst durch {0}</translation>
        </message>
    </context>
</TS>
